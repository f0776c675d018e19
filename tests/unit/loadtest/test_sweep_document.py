"""What a sweep says of engines whose curves are known."""

import functools
import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from loadtest.engine_params import EngineParams
from loadtest.pacing import Ramp
from loadtest.record import Ending, RequestRow, RunResult
from loadtest.report import markdown
from loadtest.sweep_document import (
    Measured,
    Setting,
    StepRun,
    document,
    mode_switches,
    step_figures,
    visit_figures,
)
from loadtest.sweep_plan import Visit, plan
from loadtest.workload import Drawn, Uniform, Workload
from tests.unit.loadtest.simulated_rows import line_engine, simulate

LEVELS = (1, 4, 16)
WARM_S, TOTAL_S, CLOCK = 4.0, 24.0, 2.0
# Cross at 8: 4 + n = 8 + n / 2 milliseconds.
ENGINES = {"spec": line_engine(4.0, 1.0), "base": line_engine(8.0, 0.5)}
PROVENANCE: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "seed": 1,
    "clock": CLOCK,
    "host": {"cpu": "c", "cores": 2, "gpus": None},
    "servers": {"spec": {"simulation": {"engine": "line"}}},
}


@functools.cache
def rows_of(params: EngineParams, level: int, round_: int) -> list[RequestRow]:
    workload = Workload("m", Drawn(Uniform(64, 64), Uniform(64, 192)), seed=round_)
    ramp = Ramp(((0.0, 1.0), (WARM_S / 2, float(level)), (TOTAL_S, float(level))))
    return simulate([params], ramp, workload)[0]


def result_of(rows: list[RequestRow]) -> RunResult:
    return RunResult(rows, TOTAL_S, 0.1, array("d", [1e-4] * 100))


def found(rounds: int = 3, slower_at_end: float = 1.0, **change: Any) -> dict[str, Any]:
    visits = plan(tuple(ENGINES), LEVELS, rounds)
    measured = []
    for at, visit in enumerate(visits):
        rows = rows_of(ENGINES[visit.target], visit.concurrency, visit.round or 0)
        clock = CLOCK * (slower_at_end if at == len(visits) - 1 else 1.0)
        one = Measured(visit, result_of(rows), WARM_S, TOTAL_S, 0.0, clock)
        measured.append((visit, visit_figures(one)))
    setting = Setting("m", tuple(ENGINES), LEVELS, rounds, 40.0, 8.0, 64, 128, **change)
    return document(setting, measured, None, PROVENANCE)


def test_the_figures_are_the_known_ones_in_engine_time() -> None:
    runs = found()["runs"]
    for level in LEVELS:
        for name, (base_ms, slope_ms) in {"spec": (4.0, 1.0), "base": (8.0, 0.5)}.items():
            run = runs[f"{name}@{level}"]
            tpot_s = CLOCK * (base_ms + slope_ms * level) / 1e3
            assert run["tok_s"] == pytest.approx(level / tpot_s, rel=0.02)
            assert run["request_tok_s"] == pytest.approx(1 / tpot_s, rel=0.02)
            assert run["itl_ms"]["p50"] == pytest.approx(tpot_s * 1e3, rel=0.02)


def test_the_crossover_is_the_known_one_and_lies_in_the_grid() -> None:
    crossover = found()["crossover"]
    assert crossover["between"] == [4, 16]
    assert crossover["load"] == pytest.approx(8, rel=0.05)


def test_counts_are_sums_and_figures_medians_of_the_rounds() -> None:
    run = found()["runs"]["spec@4"]
    rates = sorted(one["tok_s"] for one in run["rounds"])
    assert run["tokens"] == sum(one["tokens"] for one in run["rounds"])
    assert (run["tok_s"], run["spread"]["tok_s"]) == (
        pytest.approx(rates[1], abs=1e-3),
        [rates[0], rates[2]],
    )


def test_a_reference_that_moved_is_said() -> None:
    quiet, moved = found(), found(slower_at_end=1.1)
    assert quiet["drift"]["moved"] is False
    assert quiet["warnings"] == []
    assert moved["drift"]["moved"] is True
    assert any("spec at 4) moved by" in text for text in moved["warnings"])
    assert "moved by" in markdown(moved)


def test_an_interrupted_sweep_says_so() -> None:
    assert any("stopped" in text for text in found(1, interrupted=True)["warnings"])


def test_another_target_is_held_against_the_better_of_the_two() -> None:
    made = found(1)
    setting = Setting("m", ("spec", "base", "router"), LEVELS, 1, 40.0, 8.0, 64, 128)
    measured = [
        (visit, visit_figures(Measured(visit, result_of(rows_of(ENGINES[like], 16, 0)), *times)))
        for name, like in (("spec", "spec"), ("base", "base"), ("router", "spec"))
        for visit, times in [(Visit(name, 16, 0), (WARM_S, TOTAL_S, 0.0, CLOCK))]
    ]
    both = document(setting, measured, None, PROVENANCE)
    expected = made["runs"]["spec@16"]["tok_s"] / made["runs"]["base@16"]["tok_s"]
    assert both["against_better"] == {"router": {"16": pytest.approx(expected, abs=1e-3)}}
    assert "router makes" in markdown(both)


def test_a_visit_that_gave_up_counts_its_failures_and_no_rate() -> None:
    row = RequestRow(0, 0.0, 0.0, 8, end_s=0.1, ending=Ending.CONNECT, error="refused")
    gave_up = RunResult([row], 0.2, 0.0, array("d"), gave_up="refused")
    setting = Setting("m", ("spec",), (1,), 1, 40.0, 8.0, 64, 128)
    visit = Measured(Visit("spec", 1, 0), gave_up, WARM_S, TOTAL_S, 0.0, 1.0)
    made = document(setting, [(visit.visit, visit_figures(visit))], None, PROVENANCE)
    assert (made["runs"]["spec@1"]["tok_s"], made["runs"]["spec@1"]["errors"]) == (None, 1)
    assert "1 requests failed (1 connect): refused" in markdown(made)
    json.dumps(made)


def test_a_visit_that_lost_a_client_process_gives_no_rate_and_says_so() -> None:
    lost = result_of(rows_of(ENGINES["spec"], 4, 0))
    lost = replace(lost, gave_up="1 of 2 client processes ended early")
    one = Measured(Visit("spec", 4, 0), lost, WARM_S, TOTAL_S, 0.0, CLOCK)
    setting = Setting("m", ("spec",), (4,), 1, 40.0, 8.0, 64, 128)
    made = document(setting, [(one.visit, visit_figures(one))], None, PROVENANCE)
    assert made["runs"]["spec@4"]["tok_s"] is None
    assert any("ended early" in text for text in made["warnings"])


def test_the_report_is_a_table_with_spreads_that_is_marked_as_simulated() -> None:
    text = markdown(found())
    assert "**Simulated servers**" in text
    assert "| requests in flight | spec | base |" in text
    assert "spec and base cross at" in text
    assert text.count("\n| 16 |") == 5


def sent(at_s: float, server: str | None) -> RequestRow:
    return RequestRow(0, at_s, at_s, 8, server=server)


def test_mode_switches_are_changes_of_the_server_that_gets_most() -> None:
    names = ["a"] * 10 + ["a", "b"] + ["b"] * 8 + ["a"] * 5
    rows = [sent(place / 2, name) for place, name in enumerate(names)] + [sent(0.1, None)]
    assert mode_switches(rows, 1.0) == [6.0, 10.0]
    assert mode_switches([], 1.0) == []


def test_a_step_run_has_a_timeline_with_the_load_that_was_wanted() -> None:
    ramp = Ramp(((0.0, 1.0), (12.0, 1.0), (12.0, 4.0), (24.0, 4.0)))
    made = step_figures(StepRun("spec", ramp, result_of(rows_of(ENGINES["spec"], 4, 0)), CLOCK))
    line = made["timeline"]
    assert (line["wanted"][0], line["wanted"][-1]) == (1, 4)
    assert made["points"][-1] == [48.0, 4.0]
    assert sum(line["tok_s"]) * 48.0 / len(line["tok_s"]) == pytest.approx(made["tokens"], rel=0.02)
