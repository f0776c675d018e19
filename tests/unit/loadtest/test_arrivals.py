from itertools import islice, pairwise
from math import inf
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import Gaps, arrival_times
from loadtest.pacing import OpenLoop, Ramp

STEADY = Ramp(((0.0, 20.0),))
levels = st.floats(0.1, 50)


def test_constant_arrivals_are_evenly_spaced_from_the_begin() -> None:
    times = arrival_times(STEADY, Gaps.CONSTANT, 1, requests=5)
    assert list(times) == pytest.approx([0.0, 0.05, 0.10, 0.15, 0.20])


@pytest.mark.parametrize(
    ("gaps", "cv"), [(Gaps.POISSON, 1.0), (Gaps.GAMMA, 3.0), (Gaps.GAMMA, 0.3)]
)
def test_random_arrivals_have_their_rate_and_their_spread(gaps: Gaps, cv: float) -> None:
    times = arrival_times(STEADY, gaps, 7, requests=40_000, cv=cv)
    between = [b - a for a, b in pairwise(times)]
    assert fmean(between) == pytest.approx(1 / 20, rel=0.05)
    assert pstdev(between) / fmean(between) == pytest.approx(cv, rel=0.05)


def test_the_seed_decides_the_arrivals() -> None:
    one, same, other = (arrival_times(STEADY, Gaps.POISSON, s, requests=50) for s in (1, 1, 2))
    assert one == same != other


def test_a_ramp_brings_as_many_arrivals_as_the_area_below_it() -> None:
    rising = Ramp(((0.0, 0.0), (10.0, 20.0)))
    times = arrival_times(rising, Gaps.CONSTANT, 1, duration_s=10.0)
    # Half t^2 times 2 a second: arrival number k comes at sqrt(k).
    assert list(islice(times, 5)) == pytest.approx([0, 1, 2**0.5, 3**0.5, 2])
    assert len(times) == 100


def test_a_step_changes_the_rate_at_once() -> None:
    step = Ramp(((0.0, 1.0), (10.0, 1.0), (10.0, 50.0), (20.0, 50.0)))
    times = arrival_times(step, Gaps.CONSTANT, 1, duration_s=20.0)
    assert sum(at < 10 for at in times) == 10
    assert sum(at >= 10 for at in times) == 500


def test_a_pause_has_no_arrivals_and_the_load_goes_on_after_it() -> None:
    paused = Ramp(((0.0, 10.0), (1.0, 10.0), (1.0, 0.0), (5.0, 0.0), (5.0, 10.0), (6.0, 10.0)))
    times = arrival_times(paused, Gaps.CONSTANT, 1, duration_s=6.0)
    assert not [at for at in times if 1 < at < 5]
    assert [sum(at <= 1 for at in times), sum(at >= 5 for at in times)] == [11, 9]


def test_a_rate_that_ends_at_zero_ends_the_load() -> None:
    ending = Ramp(((0.0, 10.0), (1.0, 0.0)))
    assert len(arrival_times(ending, Gaps.CONSTANT, 1, requests=1000)) <= 6


@given(st.lists(st.tuples(st.floats(0, 9), levels), min_size=1, max_size=5), st.integers(0, 9))
def test_arrivals_are_in_order_and_bounded(points: list[tuple[float, float]], seed: int) -> None:
    rate = Ramp(tuple(sorted(points)))
    times = arrival_times(rate, Gaps.POISSON, seed, requests=200, duration_s=30.0)
    assert list(times) == sorted(times)
    assert all(0 <= at < 30 for at in times)
    assert len(times) <= 200


def test_no_duration_is_no_limit() -> None:
    assert len(arrival_times(STEADY, Gaps.CONSTANT, 1, requests=10, duration_s=inf)) == 10


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 5))
def test_the_shares_of_an_open_loop_are_the_whole_of_it(times: list[float], count: int) -> None:
    whole = OpenLoop(sorted(times))
    shares = [whole.share(index, count) for index in range(count)]
    assert sorted(at for share in shares for at in share.times_s) == list(whole.times_s)


def test_an_open_loop_names_the_times_that_have_come_whatever_is_in_flight() -> None:
    loop = OpenLoop([0.0, 0.5, 1.0, 1.5])
    assert list(loop.due(1.0, started=1, in_flight=1000)) == [0.5, 1.0]
    assert [loop.next_s(started) for started in (0, 3, 4)] == [0.0, 1.5, None]
    assert [loop.over(0.0, started) for started in (3, 4)] == [False, True]
