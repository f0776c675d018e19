"""Figures of runs, what counts as reached, and the command that prints it."""

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from loadtest.virtual.arms import CaseResult
from loadtest.virtual.bench import Case, cases
from loadtest.virtual.command import main
from loadtest.virtual.demands import DEMANDS, Demand
from loadtest.virtual.jobs import run_jobs
from loadtest.virtual.mutations import MUTATIONS
from loadtest.virtual.record import Run, Tick
from loadtest.virtual.report import markdown
from loadtest.virtual.scenario import load, names
from loadtest.virtual.summary import lost_s, most_within, settle_s

SMALL = """\
title: Small
layout: {layout}
spec: h200-tree-v1
base: h200-plain
duration_s: 6
lengths: {{prompt_tokens: 32, output_tokens: 64}}
"""
LOADS = {
    "levels": "levels: [2, 4]\n",
    "course": "course: [[0, 2], [3, 2], [3, 6]]\nmarks_s: [3]\n",
    "demands": "demands: [0.3]\nrequests: 100\nstarts: [cold, calibrated, misjudged]\n",
}


def run_of(rates: list[float]) -> Run:
    """One second at each rate."""
    total, ticks = 0.0, [Tick(0.0, (0,), (1,))]
    for quarter in range(4 * len(rates)):
        total += rates[quarter // 4] / 4
        ticks.append(Tick((quarter + 1) / 4, (round(total),), (1,)))
    return Run(("one",), len(rates), round(total), (), tuple(ticks), {1: 1.0}, (), 0)


def test_what_a_run_lost_is_in_seconds_of_the_references_rate() -> None:
    reference = run_of([400] * 20)
    run = run_of([400] * 10 + [200] * 4 + [400] * 6)
    assert lost_s(run, reference, 10, 20) == pytest.approx(2.0)
    assert lost_s(run, reference, 0, 10) == 0.0


def test_a_run_settles_when_five_seconds_are_as_good_as_the_references() -> None:
    reference = run_of([400] * 30)
    run = run_of([400] * 10 + [200] * 4 + [400] * 16)
    assert settle_s(run, reference, 10, 30) == pytest.approx(3.75)
    assert settle_s(reference, reference, 10, 30) == 0.0
    assert settle_s(run_of([200] * 30), reference, 10, 30) == 20.0


def test_the_most_switches_within_a_minute_are_found() -> None:
    assert most_within([], 60) == 0
    assert most_within([0.0, 59.0, 61.0, 200.0], 60) == 2
    assert most_within([0.0, 60.0], 60) == 1


def result(seed: int, routed: int, rival: int) -> CaseResult:
    case = Case(load("steady-chain"), level=4)
    arms = {"routed cold": {"tokens": routed}, "spec-only": {"tokens": rival}}
    return CaseResult(case, seed, arms)


def share(found: CaseResult) -> float:
    return found.tokens("routed cold") / found.tokens("spec-only")


def test_the_worst_seed_counts_and_only_the_scenarios_meant() -> None:
    results = [result(1, 99, 100), result(2, 90, 100)]
    wanted = Demand("x", "x", ("steady-*",), share, 0.95)
    reached = wanted.reached(results)
    assert reached is not None
    assert (reached.value, reached.seeds, reached.met) == (0.9, 2, False)
    assert reached.where == "steady-chain, 4 requests, seed 2"
    assert Demand("x", "x", ("trace-*",), share, 0.95).reached(results) is None
    at_most = Demand("x", "x", ("steady-*",), share, 0.95, at_least=False).reached(results)
    assert at_most is not None
    assert (at_most.value, at_most.met) == (0.99, False)


def test_a_rival_that_must_fail_fails_only_beyond_the_limit() -> None:
    for routed, met in ((90, True), (99, False)):
        found = Demand("x", "x", ("*",), share, 0.95, must_miss=True).reached(
            [result(1, routed, 100)]
        )
        assert found is not None
        assert found.met is met


def test_every_demand_has_scenarios_and_its_own_name() -> None:
    assert len({demand.name for demand in DEMANDS}) == len(DEMANDS)
    for demand in DEMANDS:
        for pattern in demand.scenarios:
            assert any(fnmatch(name, pattern) for name in names()), (demand.name, pattern)


def test_every_mutation_names_demands_of_the_scenarios_that_it_runs() -> None:
    for mutation in MUTATIONS:
        assert mutation.cases()
        assert set(mutation.demands) <= {demand.name for demand in DEMANDS}


@pytest.mark.parametrize("layout", ["disjoint", "shared"])
@pytest.mark.parametrize("kind", list(LOADS))
def test_every_kind_of_load_is_run_with_its_rivals_and_shown(
    tmp_path: Path, kind: str, layout: str
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.format(layout=layout) + LOADS[kind])
    scenario = load(str(path))
    jobs = [(case, seed, seed == 1) for case in cases(scenario) for seed in (1, 2)]
    found = run_jobs(jobs, processes=1)
    for one in found:
        assert all(figures["tokens"] > 0 for figures in one.arms.values())
        assert all(figures["errors"] == 0 for figures in one.arms.values())
    first = found[0].arms
    assert {"routed cold", "spec-only", "base-only", "least-inflight", "round-robin"} <= set(first)
    assert {"two spec", "two base"} <= set(first) or layout == "shared"
    assert bool(found[0].losses) == (kind == "course" and layout == "disjoint")
    text = markdown(found, [])
    assert "### small" in text
    assert "seeds 1, 2" in text


def test_results_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.format(layout="disjoint") + LOADS["levels"])
    jobs = [(case, 1, False) for case in cases(load(str(path)))]
    alone, spread = run_jobs(jobs, processes=1), run_jobs(jobs, processes=2)
    assert [one.arms for one in alone] == [one.arms for one in spread]


def test_the_command_writes_results_tables_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.format(layout="disjoint") + "levels: [1, 2, 3, 4]\n")
    out = tmp_path / "sim.json"
    arguments = ["--scenario", str(path), "--seeds", "1", "--processes", "1"]
    written = ["--json", str(out), "--markdown", str(tmp_path / "sim.md"), "--plot", str(tmp_path)]
    assert main([*arguments, *written]) in (0, 1)  # a decision costs what this machine makes of it
    found = json.loads(out.read_text())
    assert found["schema"] == 1
    assert found["simulated"] is True
    run = found["runs"]["small/2 requests/1/routed cold"]
    schema = {"tokens", "tok_s", "requests", "errors", "ttft_ms", "itl_ms", "e2e_ms", "switches"}
    assert schema <= set(run)
    assert found["provenance"]["seeds"] == 1
    assert (tmp_path / "sim.png").exists()
    assert "| 2 requests |" in (tmp_path / "sim.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("sim: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nope"], "no scenario 'nope'; there are: "),
        (["--trace", "/nonexistent.csv", "--scenario", "trace-chain"], "/nonexistent.csv"),
        (["--trace", "x.csv", "--scenario", "step-chain"], "--trace needs a scenario with demands"),
        (["--json", "/proc/none/x.json"], "cannot write /proc/none/x.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("crossover-loadtest sim: ")
    assert message in said
    assert said.count("\n") == 1
