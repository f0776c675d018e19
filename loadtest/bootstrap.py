"""Intervals by resampling. Pure: the randomness follows from a seed.

The percentile bootstrap of few samples is too narrow: its spread is that of n samples taken for
the truth, and it knows no heavier tail than the normal one. The expanded percentile interval
(Hesterberg, "What Teachers Should Know About the Bootstrap", 2014) takes the percentiles at

    Phi(-sqrt(n / (n - 1)) * t(n - 1))    instead of    0.025

With 3 samples a side that is the whole range of the resamples, and even this holds only 90%: three
values lie all above three others by chance in 1 of 20 cases, and all below in another.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist
from typing import TypeVar

from loadtest.stats import percentile

RESAMPLES = 2000
CONFIDENCE = 0.95
# Of fewer samples a side no interval is given.
SAMPLES_MIN = 3
_NORMAL = NormalDist()

_Item = TypeVar("_Item")
Samples = Sequence[Sequence[_Item]]


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true value lies with this confidence (0 to 1)."""

    low: float
    high: float
    confidence: float

    def holds(self, value: float) -> bool:
        """Return whether a value lies within."""
        return self.low <= value <= self.high


def interval(
    samples: Samples[_Item], statistic: Callable[[Samples[_Item]], float], seed: int
) -> Interval | None:
    """Return the 95% interval of a statistic of independent samples; None if there are too few.

    Each of the samples, numbers or anything else, is resampled by itself. Where they are so few
    that 95% cannot be had, the interval says what it has.
    """
    fewest = min(len(values) for values in samples)
    if fewest < SAMPLES_MIN:
        return None
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    found = [
        statistic([rng.choices(values, k=len(values)) for values in samples])
        for _ in range(RESAMPLES)
    ]
    tail = _NORMAL.cdf(-sqrt(fewest / (fewest - 1)) * t_quantile(fewest - 1))
    low, high = percentile(found, tail), percentile(found, 1 - tail)
    assert low is not None
    assert high is not None
    return Interval(low, high, _confidence([len(values) for values in samples]))


def _confidence(sizes: Sequence[int]) -> float:
    """Return what the extremes of so few samples can hold at most, or 95%."""
    cases = comb(sizes[0] + sizes[1], sizes[0]) if len(sizes) == 2 else 2 ** sizes[0]
    return min(CONFIDENCE, 1 - 2 / cases)


def t_quantile(freedom: int) -> float:
    """Return Student's t at 97.5%, from Abramowitz and Stegun 26.7.5; within 1% from 5 on."""
    z = _NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
    first = (z**3 + z) / (4 * freedom)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
