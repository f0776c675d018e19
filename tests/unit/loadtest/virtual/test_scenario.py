"""Scenario files: the shipped ones can be read, and what is wrong with one is said."""

from pathlib import Path

import pytest

from loadtest.virtual.bench import Bench, cases
from loadtest.virtual.scenario import Scenario, ScenarioError, load, names
from loadtest.virtual.synthetic import MEAN_PER_S, synthetic_trace

GOOD = """\
title: A test
layout: disjoint
spec: h200-chain-v2
base: h200-plain
"""


def read(folder: Path, text: str) -> Scenario:
    path = folder / "mine.yaml"
    path.write_text(text)
    return load(str(path))


@pytest.mark.parametrize("name", names())
def test_a_shipped_scenario_can_be_read_and_has_cases(name: str) -> None:
    scenario = load(name)
    assert scenario.name == name
    found = cases(scenario)
    assert len(found) == len({case.label for case in found}) >= 1


def test_there_is_a_scenario_of_each_kind() -> None:
    shipped = [load(name) for name in names()]
    assert any(s.levels for s in shipped)
    assert any(s.course for s in shipped)
    assert any(s.demands for s in shipped)
    assert any(s.spec.threshold for s in shipped)
    assert len({s.layout for s in shipped}) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("levels: [1]\nspeed: 3\n", ":6 speed: is unknown; known: "),
        ("", "exactly one of levels, course and demands, has none"),
        ("levels: [1]\ncourse: [[0, 1]]\nmarks_s: [0]\n", "has levels and course"),
        ("levels: [0]\n", ":5 levels[0]: is 0, expected a number from 1 to 1024"),
        ("levels: [1.5]\n", ":5 levels: must be whole numbers"),
        ("levels: 4\n", ":5 levels: must be a list of numbers"),
        ("levels: [1]\nnoise: 2\n", ":6 noise: is 2, expected a number from 0 to 0.5"),
        ("levels: [1]\nstarts: [warm]\n", "a list of: cold, calibrated, misjudged"),
        ("levels: [1]\nlengths: long\n", "allowed: chat, trace or {prompt_tokens: N"),
        ("levels: [1]\nlengths: {prompt_tokens: 0, output_tokens: 5}\n", "from 1 to 4000"),
        ("demands: [0.5]\n", " requests: is missing"),
        ("course: [[0, 1]]\n", " marks_s"),
        ("course: [[5, 1], [0, 2]]\nmarks_s: [0]\n", "must be in the order of time"),
        ("course: [5, 1]\nmarks_s: [0]\n", "must be a list of [seconds, level] pairs"),
        (
            "course: [[0, 1]]\nmarks_s: [0]\nevents: [{at_s: 1, server: both, alive: false}]\n",
            "events[0].server: is 'both', allowed: spec, base",
        ),
        (
            "course: [[0, 1]]\nmarks_s: [0]\nevents: [{at_s: 1, server: spec}]\n",
            "events[0]: needs exactly one of slowness, accept_length and alive",
        ),
        (
            "course: [[0, 1]]\nmarks_s: [0]\nevents: [{at_s: 1, server: spec, accept_length: 9}]\n",
            "accept_length: is 9, expected a number from 1 to 4",
        ),
        (
            "course: [[0, 1]]\nmarks_s: [0]\nevents: [{at_s: 1, server: base, accept_length: 2}]\n",
            "only a server that speculates",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read(tmp_path, GOOD + lines)
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("h200-plain", "h300") + "levels: [1]\n", "is 'h300', allowed: h200-plain"),
        (GOOD.replace("disjoint", "both") + "levels: [1]\n", "allowed: shared, disjoint"),
        (GOOD.replace("title: A test\n", "") + "levels: [1]\n", "title: is missing"),
        (
            GOOD.replace("h200-chain-v2", "field-eagle") + "levels: [1]\nthreshold: 8\n",
            "whose steps without speculation are unknown",
        ),
        ("- 1\n", "expected settings"),
        ("title: [\n", "not valid YAML"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=r"mine\.yaml") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario 'nope'; there are: .*steady-chain"):
        load("nope")


def test_a_demand_scales_the_trace_to_its_share_of_the_better_servers_capacity(
    tmp_path: Path,
) -> None:
    text = GOOD + "lengths: {prompt_tokens: 64, output_tokens: 64}\ndemands: [0.2, 0.4]\n"
    low, high = (Bench(case, 1) for case in cases(read(tmp_path, text + "requests: 200\n")))
    assert low.until_s == pytest.approx(2 * high.until_s)


def test_the_synthetic_trace_is_the_same_for_a_seed_and_as_described() -> None:
    rows = synthetic_trace(20_000, seed=4)
    assert rows[:100] == synthetic_trace(100, seed=4)
    assert rows != synthetic_trace(20_000, seed=5)
    assert len(rows) / rows[-1].at_s == pytest.approx(MEAN_PER_S, rel=0.2)
    mean_prompt = sum(row.prompt_tokens for row in rows) / len(rows)
    mean_output = sum(row.output_tokens for row in rows) / len(rows)
    assert (mean_prompt, mean_output) == (
        pytest.approx(1190, rel=0.03),
        pytest.approx(218, rel=0.03),
    )
    counts = [0] * (int(rows[-1].at_s) // 10)
    for row in rows:
        if row.at_s < 10 * len(counts):
            counts[int(row.at_s / 10)] += 1
    mean = sum(counts) / len(counts)
    dispersion = sum((count - mean) ** 2 for count in counts) / len(counts) / mean
    assert 2.0 < dispersion < 8.0
