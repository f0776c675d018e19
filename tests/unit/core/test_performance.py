import pytest

from router.core.performance import Curve, Point
from router.core.tuning import Tuning

_TUNING = Tuning()


def line(n: float) -> float:
    return 0.005 + 0.0001 * n


def seen(*loads: float, tuning: Tuning = _TUNING, windows: int = 10) -> Curve:
    """A curve that has seen the line at these loads, half a second apart."""
    curve = Curve(tuning)
    now = 0.0
    for load in loads:
        for _ in range(windows):
            now += 0.5
            curve.observe(now, load, line(load), 1.0)
    return curve


def test_a_line_is_found_from_two_loads() -> None:
    curve = seen(4, 32)
    for n in (1, 8, 64, 128):
        assert curve.seconds(n) == pytest.approx(line(n), rel=0.03)
        assert curve.slope(n) == pytest.approx(0.0001, rel=0.1)


def test_one_load_alone_is_taken_to_rise_little() -> None:
    curve = seen(4)
    assert curve.seconds(4) == pytest.approx(line(4), rel=0.001)
    assert curve.slope(4) == pytest.approx(0.02 * curve.seconds(0.001), rel=0.1)
    assert seen(4, tuning=Tuning(slope_prior=0.2)).slope(4) > 5 * curve.slope(4)


def test_levels_never_fall_with_load() -> None:
    curve = Curve(_TUNING, [Point(4, 0.006, 10), Point(8, 0.005, 10), Point(16, 0.007, 10)])
    levels = [curve.seconds(n) for n in (4, 8, 16)]
    assert levels == sorted(levels)


def test_less_evidence_means_a_wider_band_and_more_optimism() -> None:
    curve = seen(8)
    near, far = curve.estimate(8), curve.estimate(128)
    assert near.low < near.value < near.high
    assert far.high / far.value > near.high / near.value
    assert curve.optimistic(128) / curve.seconds(128) < curve.optimistic(8) / curve.seconds(8) < 1


def test_no_optimism_where_it_is_switched_off() -> None:
    curve = seen(8, tuning=Tuning(optimism=0.0))
    assert curve.optimistic(100) == curve.seconds(100)


def test_two_windows_that_are_far_off_rescale_every_level() -> None:
    curve = seen(2, 8, 32)
    for now in (100.0, 101.0):
        curve.observe(now, 8, 1.8 * line(8), 1.0)
    assert curve.changes == 1
    assert curve.seconds(32) == pytest.approx(1.8 * line(32), rel=0.1)
    assert curve.seconds(2) == pytest.approx(1.8 * line(2), rel=0.1)


def test_a_single_outlier_rescales_nothing() -> None:
    curve = seen(2, 8, 32)
    curve.observe(100.0, 8, 3 * line(8), 1.0)
    curve.observe(101.0, 8, line(8), 1.0)
    assert curve.changes == 0
    assert curve.seconds(32) == pytest.approx(line(32), rel=0.05)


def test_windows_off_on_either_side_are_noise() -> None:
    curve = seen(2, 8, 32)
    for turn in range(20):
        curve.observe(100.0 + turn, 8, line(8) * (1.3 if turn % 2 else 0.7), 1.0)
    assert curve.changes == 0


def test_a_better_window_than_expected_makes_a_server_promising() -> None:
    curve = seen(2, 8)
    assert not curve.seems_faster
    curve.observe(100.0, 8, 0.6 * line(8), 0.5)
    assert curve.seems_faster


def test_old_evidence_gives_way_to_new() -> None:
    curve = Curve(_TUNING)
    for now in range(20):
        curve.observe(float(now), 8, 0.010, 1.0)
    for now in (300.0, 301.0, 302.0):
        curve.observe(now, 8, 0.0112, 1.0)
    assert curve.seconds(8) == pytest.approx(0.0112, rel=0.02)


@pytest.mark.parametrize(
    ("sequences", "seconds", "weight"),
    [
        (0.0, 0.01, 1.0),
        (-1.0, 0.01, 1.0),
        (8.0, 0.0, 1.0),
        (8.0, float("inf"), 1.0),
        (8.0, float("nan"), 1.0),
        (float("nan"), 0.01, 1.0),
        (8.0, 0.01, 0.0),
    ],
)
def test_what_cannot_be_a_window_is_left_out(
    sequences: float, seconds: float, weight: float
) -> None:
    curve = Curve(_TUNING)
    curve.observe(0.0, sequences, seconds, weight)
    assert not curve.known


def test_memory_is_bounded() -> None:
    curve = Curve(_TUNING)
    for n in range(1, 5000, 7):
        curve.observe(float(n), n, line(n), 1.0)
    assert len(curve.points()) < 40
