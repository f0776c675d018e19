"""When an open loop starts its requests: gaps drawn at a rate of 1, stretched to a rate over time.

A rate r(t) makes R(t) = its integral from 0 to t arrivals by time t. Arrivals of a process of rate
1 at x1, x2, ... become arrivals of rate r at R^-1(x1), R^-1(x2), ... (time change of a point
process), so that every kind of gap goes with every shape of rate.
"""

import random
from array import array
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from math import inf, sqrt

from loadtest.pacing import Ramp

ARRIVALS_MAX = 1_000_000


class Gaps(StrEnum):
    """How arrivals of a steady rate follow each other."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


def arrival_times(
    rate: Ramp,
    gaps: Gaps,
    seed: int,
    *,
    requests: int = ARRIVALS_MAX,
    duration_s: float = inf,
    cv: float = 1.0,
) -> "array[float]":
    """Return the arrivals, at most `requests` and within `duration_s`, in seconds.

    `rate` is in requests per second. `cv` is the coefficient of variation of gamma gaps: 1 is
    Poisson, above it bursts, below it evenness.
    """
    rng = random.Random(f"{seed}/arrivals")  # noqa: S311 - load, not secrets
    times = array("d")
    segments = _segments(rate)
    start_s, r0, r1, length_s = next(segments)
    before = arrivals = 0.0
    for gap in _unit_gaps(gaps, rng, cv):
        arrivals += gap
        while arrivals - before > (r0 + r1) / 2 * length_s or r0 == r1 == 0:
            following = next(segments, None)
            if following is None:
                return times
            before += (r0 + r1) / 2 * length_s
            start_s, r0, r1, length_s = following
        at_s = start_s + _time_for(arrivals - before, r0, (r1 - r0) / length_s)
        if at_s >= duration_s or len(times) >= min(requests, ARRIVALS_MAX):
            return times
        times.append(at_s)
    return times


def _segments(rate: Ramp) -> Iterator[tuple[float, float, float, float]]:
    """Yield start, rate there, rate at the end and length of each piece; the last has no end."""
    for (start_s, r0), (end_s, r1) in pairwise(rate.points):
        if end_s > start_s:
            yield start_s, r0, r1, end_s - start_s
    last_s, last = rate.points[-1]
    yield last_s, last, last, inf


def _time_for(arrivals: float, rate: float, slope: float) -> float:
    """Solve rate t + slope t^2 / 2 = arrivals for t, in the form that no slope of 0 breaks."""
    if arrivals <= 0:
        return 0.0
    return 2 * arrivals / (rate + sqrt(max(rate * rate + 2 * slope * arrivals, 0.0)))


def _unit_gaps(gaps: Gaps, rng: random.Random, cv: float) -> Iterator[float]:
    if gaps is Gaps.CONSTANT:
        yield 0.0
        while True:
            yield 1.0
    shape = 1.0 if gaps is Gaps.POISSON else 1 / cv**2
    while True:
        yield rng.gammavariate(shape, 1 / shape)
