import random
import statistics

import pytest

from loadtest.bootstrap import Interval, Samples, interval, t_quantile

TRUTH = 1.25


def ratio(samples: Samples[float]) -> float:
    return statistics.median(samples[1]) / statistics.median(samples[0])


@pytest.mark.parametrize(
    ("size", "least"), [(3, 0.84), (5, 0.91), (12, 0.91)], ids=["3", "5", "12"]
)
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(size: int, least: float) -> None:
    """Lognormal rates of known medians; `least` is the promise less three standard errors."""
    rng = random.Random(7)
    held = 0
    trials = 200
    for seed in range(trials):
        a = [rng.lognormvariate(5.0, 0.1) for _ in range(size)]
        b = [TRUTH * rng.lognormvariate(5.0, 0.1) for _ in range(size)]
        found = interval((a, b), ratio, seed)
        assert found is not None
        held += found.holds(TRUTH)
    assert held / trials >= least


def test_the_interval_of_a_mean_is_students() -> None:
    """Of a normal sample: mean plus and minus t s / sqrt(n), within what 2000 resamples give."""
    rng = random.Random(1)
    values = [rng.gauss(100, 10) for _ in range(30)]
    found = interval((values,), lambda samples: statistics.mean(samples[0]), 3)
    assert found is not None
    half = 2.045 * statistics.stdev(values) / 30**0.5
    mean = statistics.mean(values)
    assert found.low == pytest.approx(mean - half, abs=half / 8)
    assert found.high == pytest.approx(mean + half, abs=half / 8)
    assert found.confidence == 0.95


def test_three_samples_a_side_do_not_promise_more_than_nine_tenths() -> None:
    found = interval(([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]), ratio, 1)
    assert found is not None
    assert found.confidence == pytest.approx(0.9)
    assert (found.low, found.high) == pytest.approx((2.0 / 1.2, 2.2 / 1.0))


def test_two_samples_give_no_interval() -> None:
    assert interval(([1.0, 1.1], [2.0, 2.1, 2.2]), ratio, 1) is None


def test_one_seed_gives_one_interval() -> None:
    a, b = [1.0, 1.3, 1.1, 1.2, 1.15], [2.0, 2.2, 2.1, 2.4, 2.3]
    assert interval((a, b), ratio, 5) == interval((a, b), ratio, 5)


@pytest.mark.parametrize(("freedom", "t"), [(5, 2.571), (10, 2.228), (30, 2.042)])
def test_students_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, rel=0.01)


def test_an_interval_holds_its_ends() -> None:
    assert Interval(1.0, 2.0, 0.95).holds(2.0)
    assert not Interval(1.0, 2.0, 0.95).holds(2.01)
