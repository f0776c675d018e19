"""What is known of an engine model at each steady load, and the best that two of them can do.

A curve is measured as an operator would: closed loops at a few levels, in virtual time, without
noise. Between the levels the time per token is linear, beyond the last its last slope goes on.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from loadtest.pacing import ClosedLoop, Ramp
from loadtest.virtual.loop import World
from loadtest.virtual.station import Server
from loadtest.workload import Lengths, Workload
from router.core.policy import FixedPolicy

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KNOWN_MAX = 512
CURVE_SEED = 77
_REQUESTS_MIN = 400
_ROUNDS = 12


@dataclass(frozen=True)
class Curve:
    """Tokens per second of one server with so many requests in flight, in a closed loop."""

    levels: tuple[int, ...]
    rates_tok_s: tuple[float, ...]

    @cached_property
    def table_s(self) -> tuple[float, ...]:
        """Time per output token of each request, in seconds, at 0 (as at 1) to KNOWN_MAX."""
        return tuple(self._time_s(max(n, 1)) for n in range(KNOWN_MAX + 1))

    @cached_property
    def table_tok_s(self) -> tuple[float, ...]:
        """Tokens per second at 0 to KNOWN_MAX requests in flight."""
        return tuple(n / time_s for n, time_s in enumerate(self.table_s))

    def _time_s(self, n: int) -> float:
        times_s = [level / rate for level, rate in zip(self.levels, self.rates_tok_s, strict=True)]
        if len(times_s) == 1:
            return times_s[0]
        at = min(max(bisect_right(self.levels, n), 1), len(self.levels) - 1)
        low, high = self.levels[at - 1], self.levels[at]
        slope_s = (times_s[at] - times_s[at - 1]) / (high - low)
        return times_s[at - 1] + slope_s * (max(n, self.levels[0]) - low)

    def scaled(self, slowness: float) -> "Curve":
        """Return the curve of the same server so many times as slow."""
        return replace(self, rates_tok_s=tuple(rate / slowness for rate in self.rates_tok_s))


def measure(server: Server, lengths: Lengths, reach: int = LEVELS[-1]) -> Curve:
    """Return a server's curve for requests of these lengths, which are frozen and so hashable.

    It is measured up to the first of LEVELS that is not below `reach`.
    """
    count = min(max(bisect_left(LEVELS, reach) + 1, 2), len(LEVELS))
    levels = LEVELS[:count]
    hashable = cast("Hashable", lengths)
    return Curve(levels, tuple(_steady_tok_s(server, hashable, level) for level in levels))


@lru_cache(maxsize=4096)
def _steady_tok_s(server: Server, lengths: Hashable, level: int) -> float:
    """Return the rate between the end of the second round and the start of the last request."""
    workload = Workload("simulated", cast("Lengths", lengths), CURVE_SEED)
    requests = max(_REQUESTS_MIN, _ROUNDS * level) + 2 * level
    loop = ClosedLoop(Ramp(((0.0, float(level)),)), requests=requests)
    run = World((server,), FixedPolicy(server.role)).run(loop, workload, looks_s=())
    ends_s = sorted(request.end_s for request in run.requests if request.end_s is not None)
    start_s, stop_s = ends_s[2 * level - 1], run.requests[-1].intended_s
    inside = [tick for tick in run.ticks if start_s <= tick.at_s <= stop_s]
    if len(inside) < 2:
        raise ValueError(f"{server.name}: too few requests to measure a rate at {level}")
    first, last = inside[0], inside[-1]
    return (sum(last.tokens) - sum(first.tokens)) / (last.at_s - first.at_s)


def best_single_tok_s(curves: Sequence[Curve], n: int) -> float:
    """Return O1: the rate of the better server with all `n` requests."""
    return max(curve.table_tok_s[min(n, KNOWN_MAX)] for curve in curves)


def best_split(spec: Curve, base: Curve, n: int) -> tuple[int, float]:
    """Return O3: how many of `n` requests on spec make most tokens, and how many per second."""
    n = min(n, KNOWN_MAX)
    on_spec, on_base = spec.table_tok_s, base.table_tok_s
    best = max(range(n + 1), key=lambda k: on_spec[k] + on_base[n - k])
    return best, on_spec[best] + on_base[n - best]


def capacity_tok_s(curve: Curve) -> float:
    """Return the most that a server makes at any level up to the last one measured."""
    return max(curve.rates_tok_s)
