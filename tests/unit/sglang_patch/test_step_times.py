import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patch.rule import Mode
from sglang_patch.step_times import Curve, Sample, StepTimes, fit

CURVE = Curve((1, 8, 64), (0.004, 0.005, 0.012), 1e-7)


@pytest.mark.parametrize(
    ("running", "expected"),
    [(1, 0.004), (8, 0.005), (36, 0.0085), (64, 0.012), (120, 0.019)],
)
def test_time_runs_straight_between_batch_sizes_and_on_beyond_the_last(
    running: int, expected: float
) -> None:
    assert CURVE.predict(running, 0) == pytest.approx(expected)


def test_context_adds_its_share() -> None:
    assert CURVE.predict(8, 20_000) == pytest.approx(0.007)


def test_one_size_alone_is_taken_for_all() -> None:
    assert Curve((4,), (0.01,)).predict(256, 0) == 0.01


@pytest.mark.parametrize(
    ("batches", "seconds", "slope"),
    [
        ((), (), 0.0),
        ((1, 2), (0.1,), 0.0),
        ((2, 1), (0.1, 0.1), 0.0),
        ((0,), (0.1,), 0.0),
        ((1,), (0.0,), 0.0),
        ((1,), (math.nan,), 0.0),
        ((1,), (0.1,), -1e-6),
        ((1,), (0.1,), math.inf),
    ],
)
def test_what_is_no_curve_is_refused(
    batches: tuple[int, ...], seconds: tuple[float, ...], slope: float
) -> None:
    with pytest.raises(ValueError, match="needs growing batch sizes"):
        Curve(batches, seconds, slope)


def test_times_survive_json() -> None:
    times = StepTimes(CURVE, Curve((1,), (0.003,)))
    assert StepTimes.load(times.dump()) == times


@pytest.mark.parametrize("value", [None, [], {}, {"on": {"seconds": {}}}, {"on": 3, "off": 3}])
def test_other_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"no step times|needs growing"):
        StepTimes.load(value)


def steps(mode: Mode, running: int, context: int, seconds: list[float]) -> list[Sample]:
    return [Sample(mode, running, context + step, each) for step, each in enumerate(seconds)]


def test_a_fit_takes_medians_and_the_slope_of_the_long_contexts() -> None:
    samples = [
        *steps(Mode.ON, 1, 20, [0.010, 0.010, 0.5]),
        *steps(Mode.ON, 8, 160, [0.012] * 3),
        *steps(Mode.ON, 8, 32_160, [0.020] * 3),
        *steps(Mode.OFF, 8, 160, [0.006] * 3),
    ]
    times = fit(samples)
    assert times.on.context_token_s == pytest.approx(0.008 / 32_000)
    assert times.on.predict(8, 32_160) == pytest.approx(0.020, rel=0.01)
    assert times.on.predict(1, 20) == pytest.approx(0.010, rel=0.01)
    assert times.off == Curve((8,), (0.006,))


def test_contexts_that_hardly_differ_give_no_slope() -> None:
    samples = steps(Mode.ON, 4, 100, [0.01, 0.02, 0.03]) + steps(Mode.OFF, 4, 100, [0.01])
    assert fit(samples).on.context_token_s == 0


def test_a_mode_that_was_not_seen_is_no_fit() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        fit(steps(Mode.ON, 4, 100, [0.01]))


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 50_000), st.floats(1e-4, 1.0)), min_size=1
    )
)
def test_whatever_is_measured_makes_a_curve(found: list[tuple[int, int, float]]) -> None:
    samples = [Sample(mode, *each) for mode in Mode for each in found]
    times = fit(samples)
    assert all(times.predict(mode, 5, 1000) > 0 for mode in Mode)
