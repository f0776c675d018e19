"""The calibration's points against engines whose curves are known."""

import functools

import pytest

from loadtest import crossing
from loadtest.calibration_points import (
    LevelFigures,
    interference,
    level_figures,
    plan,
    staircase,
    ttft_points,
)
from loadtest.engine_model import Gpu
from loadtest.engine_params import EngineParams
from loadtest.workload import Drawn, Recorded, Uniform, Workload
from tests.unit.loadtest.simulated_rows import line_engine, simulate

LEVELS = (1, 2, 4, 8, 16, 32)
WORKLOAD = Workload("m", Drawn(Uniform(256, 256), Uniform(128, 384)), seed=1)
# Cross at 12: 4 + n = 10 + n / 2 milliseconds.
SPEC = line_engine(4.0, 1.0, accept=2.2)
BASE = line_engine(10.0, 0.5)


@functools.cache
def climb(params: EngineParams, budget_s: float = 200.0, clock: float = 1.0) -> list[LevelFigures]:
    made = plan(LEVELS, budget_s)
    ramp, holds = staircase(LEVELS, made.holds_s)
    (rows,) = simulate([params], ramp, WORKLOAD)
    return level_figures(rows, holds, ramp.points[-1][0], clock)


@pytest.mark.parametrize(
    ("params", "base_ms", "slope_ms", "off"), [(BASE, 10.0, 0.5, 0.005), (SPEC, 4.0, 1.0, 0.02)]
)
def test_the_time_per_token_is_the_known_one(
    params: EngineParams, base_ms: float, slope_ms: float, off: float
) -> None:
    """Of the speculating engine's luck, this budget leaves 1% at one request."""
    found = climb(params, 600.0)
    assert [figures.level for figures in found] == list(LEVELS)
    for figures in found:
        sequences = figures.whole.sequences
        assert sequences == pytest.approx(figures.level, rel=0.01)
        assert figures.tpot_s == pytest.approx((base_ms + slope_ms * sequences) / 1e3, rel=off)


def test_the_bounds_hold_the_known_time_per_token() -> None:
    """Of a speculating engine, whose luck varies; 95% bounds at six levels may miss once."""
    found = [figures.point(1, None) for figures in climb(SPEC)]
    held = [p.low_s <= (4.0 + p.sequences) / 1e3 <= p.high_s for p in found]
    assert sum(held) >= len(LEVELS) - 1
    assert all(p.low_s < p.s < p.high_s < 1.2 * p.s for p in found)


def test_the_crossover_is_the_known_one_and_lies_in_the_grid() -> None:
    spec, base = (
        {float(figures.level): figures.whole.tok_s for figures in climb(params)}
        for params in (SPEC, BASE)
    )
    found = crossing.find(spec, base)
    assert found is not None
    assert found.between == (8, 16)
    assert found.load == pytest.approx(12, rel=0.04)


def test_a_clock_gives_engine_time() -> None:
    for quick, plain in zip(climb(BASE, clock=4.0), climb(BASE), strict=True):
        assert quick.tpot_s == pytest.approx(4 * plain.tpot_s)
        assert quick.whole.tok_s == pytest.approx(plain.whole.tok_s / 4)


def test_ttft_is_the_known_line_over_the_prefill_tokens() -> None:
    """One at a time, an engine that takes 50 microseconds a prompt token."""
    params = line_engine(1.0, 0.0, prefill_token_s=50e-6)
    lengths = Recorded(((64, 2), (256, 2), (1024, 2)))
    ramp, _ = staircase((1,), (5.0,))
    (rows,) = simulate([params], ramp, Workload("m", lengths, seed=1))
    points = ttft_points(rows, clock=1.0, seed=1)
    assert [point.prefill_tokens for point in points] == [64, 256, 1024]
    for point in points:
        assert point.s == pytest.approx(50e-6 * point.prefill_tokens, rel=0.02)
        assert point.low_s <= point.s <= point.high_s


@pytest.mark.parametrize("shared", [True, False])
def test_the_interference_is_that_of_the_gpus(shared: bool) -> None:
    made = plan(LEVELS, 60.0)
    ramp, holds = staircase((8,), (made.together_s,))
    both = simulate([SPEC, BASE], ramp, WORKLOAD, shared=shared)
    together = {
        name: level_figures(rows, holds, made.together_s, 1.0)[0]
        for name, rows in zip(("spec", "base"), both, strict=True)
    }
    alone = {
        name: next(figures for figures in climb(params) if figures.level == 8)
        for name, params in (("spec", SPEC), ("base", BASE))
    }
    found = interference(alone, together, 1)
    assert found is not None
    known = 1 / Gpu.CONTENDED_SHARE_OF_TWO / 1 if shared else 1.0
    assert found.slowdown == pytest.approx(known, rel=0.02)
    assert found.low <= found.slowdown <= found.high
    assert interference(alone, {"spec": together["spec"]}, 1) is None


def test_a_run_that_was_stopped_gives_the_levels_that_were_done() -> None:
    ramp, holds = staircase(LEVELS, (2.0,) * 6)
    (rows,) = simulate([BASE], ramp, WORKLOAD)
    assert [f.level for f in level_figures(rows, holds, 4.1, 1.0)] == [1, 2]


@pytest.mark.parametrize("budget_s", [20.0, 120.0])
def test_a_plan_spends_the_budget(budget_s: float) -> None:
    made = plan((1, 2, 4), budget_s)
    spent_s = 2 * (sum(made.holds_s) + made.singles_s) + made.together_s
    assert spent_s == pytest.approx(budget_s)
    assert made.together_level == 2


def test_a_budget_that_is_too_short_says_what_it_takes() -> None:
    with pytest.raises(ValueError, match="5 s are too short for 6 levels: 25 s at least"):
        plan(LEVELS, 5.0)
    plan(LEVELS, 25.0)
