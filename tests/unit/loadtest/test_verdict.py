from typing import Any

import pytest

from loadtest import verdict
from loadtest.forecast import Forecast
from loadtest.scenarios import SCENARIOS
from router.core.types import Layout

AHEAD = Forecast(
    policy="split",
    threshold=8,
    runs={"spec-only": 100.0, "base-only": 200.0, "least-inflight": 290.0, "routed": 300.0},
    equal_pairs={"two base": 400.0, "two spec": 150.0},
)


def run(tok_s: float, **other: Any) -> dict[str, Any]:
    spread = {"p50": 1000.0, "p99": 2000.0}
    return {
        "tokens": round(tok_s * 10),
        "tok_s": tok_s,
        "requests": 10,
        "errors": 0,
        "error_kinds": {},
        "switches": 3,
        "ttft_ms": {"p50": None, "p99": None},
        "itl_ms": spread,
        "e2e_ms": spread,
        "duration_s": 10.0,
        "cpu_s": {"client": 1.0, "router": None, "engines": None},
        "client_lag_ms": {"mean": 0.5, "max": 5.0},
        "engine_slipped_s": 0.0,
        "model_tok_s": tok_s,
    } | other


def runs(**tok_s: float) -> dict[str, dict[str, Any]]:
    rates = {"spec-only": 100.0, "base-only": 200.0, "least-inflight": 290.0, "routed": 300.0}
    rates |= {name.replace("_", "-"): rate for name, rate in tok_s.items()}
    return {name: run(rate) for name, rate in rates.items()}


def test_the_verdict_gives_the_second_gpu_its_due() -> None:
    said = verdict.sentence(runs(), AHEAD, Layout.DISJOINT)
    assert "1.50x the tokens of the better single server (base-only)" in said
    assert "0.75x of the better equal pair" in said
    assert "the second GPU alone explains the gain" in said


def test_the_verdict_says_when_a_mixed_pair_is_better_than_an_equal_one() -> None:
    ahead = Forecast("split", 8, AHEAD.runs, {"two base": 250.0, "two spec": 150.0})
    said = verdict.sentence(runs(), ahead, Layout.DISJOINT)
    assert "20% is more than a second GPU alone gives" in said


def test_on_shared_gpus_the_verdict_says_that_switching_does_not_pay() -> None:
    said = verdict.sentence(runs(routed=190.0), AHEAD, Layout.SHARED)
    assert "0.95x" in said
    assert "switching does not pay" in said


def test_the_better_single_server_is_the_one_with_more_tokens() -> None:
    assert verdict.better_single(runs(spec_only=500.0)) == "spec-only"


def test_sound_runs_raise_no_warning() -> None:
    assert verdict.warnings(runs(), clock=1.0) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engine_slipped_s": 0.3}, "an engine fell 3.0% behind"),
        ({"cpu_s": {"client": 9.0}}, "the client is the bottleneck"),
        ({"client_lag_ms": {"mean": 20.0, "max": 90.0}}, "the client is the bottleneck"),
        ({"model_tok_s": 400.0}, "75% of what the engine models give"),
        ({"errors": 2, "error_kinds": {"connect": 2}}, "2 requests failed (2 connect)"),
    ],
    ids=["engine", "client cpu", "client lag", "model", "errors"],
)
def test_what_makes_a_run_doubtful_is_said(changed: dict[str, Any], words: str) -> None:
    (warning,) = verdict.warnings({"routed": run(300.0, **changed)}, clock=1.0)
    assert warning.startswith("routed: ")
    assert words in warning


def test_a_fast_clock_and_a_drawn_curve_are_noted() -> None:
    notes = verdict.notes(AHEAD, SCENARIOS["field"], interpolated=True)
    assert any("clock 8 times as fast" in note for note in notes)
    assert any("interpolated" in note for note in notes)
    assert len(verdict.notes(AHEAD, SCENARIOS["h200-tree"], interpolated=False)) == 1


def test_the_table_compares_with_the_better_single_server() -> None:
    lines = verdict.table(runs()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:2] == ["tok/s", "x"]
    assert lines[-1].split()[:4] == ["routed", "300", "1.50", "-"]
