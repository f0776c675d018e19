"""Rows to figures: pairs are made within a round, and a verdict needs the whole interval."""

import pytest

from tests.gpu.arms import MAX_RUNNING_REQUESTS, arms, gpu_site
from tests.gpu.figures import NO_DIFFERENCE, decode_throughputs, find_key, judge, ratio
from tests.gpu.plan import parse_stages


def rows_of(arm: str, level: int, *tok_s: float, stage: int = 1) -> list[dict]:
    return [
        {"stage": stage, "round": number, "arm": arm, "level": level, "tok_s": value}
        for number, value in enumerate(tok_s)
    ]


def test_ratios_pair_measurements_of_the_same_round() -> None:
    # Both arms drift together by a factor of 2: unpaired, the difference would drown in it.
    rows = rows_of("new", 8, 110, 220, 165) + rows_of("old", 8, 100, 200, 150)
    found = ratio(rows, "new", "old", 8)
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert found.verdict == "faster"


def test_an_interval_that_holds_one_shows_no_difference() -> None:
    rows = rows_of("new", 8, 95, 101, 105) + rows_of("old", 8, 100, 100, 100)
    found = ratio(rows, "new", "old", 8)
    assert found is not None
    assert found.verdict == NO_DIFFERENCE


def test_one_pair_shows_no_difference() -> None:
    found = ratio(rows_of("new", 8, 200) + rows_of("old", 8, 100), "new", "old", 8)
    assert found is not None
    assert found.verdict == NO_DIFFERENCE


def test_arms_of_different_stages_are_not_paired() -> None:
    rows = rows_of("new", 8, 100, stage=1) + rows_of("old", 8, 100, stage=2)
    assert ratio(rows, "new", "old", 8) is None


def test_a_goal_is_met_by_the_median() -> None:
    rows = rows_of("chain-patched", 256, 94, 93.5, 10) + rows_of("plain", 256, 100, 100, 100)
    (answer,) = judge(rows)
    assert answer["met"]
    rows = rows_of("chain-patched", 256, 94, 92, 10) + rows_of("plain", 256, 100, 100, 100)
    (answer,) = judge(rows)
    assert not answer["met"]


def test_a_slower_arm_does_not_count_as_no_slower() -> None:
    rows = rows_of("tree-patched", 1, 98, 97, 99) + rows_of("tree", 1, 100, 100, 100)
    (answer,) = judge(rows)
    assert not answer["met"]


def test_decode_throughput_is_read_at_the_asked_batch_size_only() -> None:
    log = (
        "[x] Decode batch, #running-req: 8, #token: 64, token usage: 0.00, accept len: 2.20, "
        "cuda graph: True, gen throughput (token/s): 1500.25, #queue-req: 0\n"
        "[x] Prefill batch, #new-seq: 1, #running-req: 8, input throughput (token/s): 9.00\n"
        "[x] Decode batch, #running-req: 7, cuda graph: True, gen throughput (token/s): 3.00\n"
    )
    assert decode_throughputs(log, 8) == [1500.25]


def test_a_key_is_found_at_any_depth() -> None:
    document = {"loads": [{"a": 1}, {"spec_switch": {"mode": "on"}}]}
    assert find_key(document, "spec_switch") == {"mode": "on"}
    assert find_key(document, "absent") is None


def test_stages_read_arms_levels_and_rounds() -> None:
    first, second = parse_stages(["a,b@1,8@5", "b"], ["a", "b"], (1, 2))
    assert (first.arms, first.levels, first.rounds) == (("a", "b"), (1, 8), 5)
    assert (second.number, second.levels, second.rounds) == (2, (1, 2), 3)


@pytest.mark.parametrize("word", ["a,c", "a,a", "a,b,c,d"])
def test_a_stage_that_cannot_run_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="arm"):
        parse_stages([word], ["a", "b", "d"] if word != "a,b,c,d" else list("abcd"), (1,))


def test_only_patched_arms_find_the_plugin(tmp_path) -> None:
    site = gpu_site(tmp_path, {"PYTHONPATH": "/kit"}, (1, MAX_RUNNING_REQUESTS))
    known = arms(8, 90)
    stock = site.server_environment(known["chain"], tmp_path / "plugin")
    patched = site.server_environment(known["chain-patched"], tmp_path / "plugin")
    assert stock["PYTHONPATH"] == "/kit"
    assert not any(name.startswith("SGLANG_SPEC_SWITCH_") for name in stock)
    assert patched["PYTHONPATH"] == f"{tmp_path / 'plugin'}:/kit"
    assert patched["SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD"] == "90"
    assert site.command(known["chain"], 1, 2)[:3] == site.command(known["plain"], 1, 2)[:3]
