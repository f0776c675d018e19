"""When requests start. Pure: elapsed seconds in, intended start times out.

A pacer is asked at every tick and after every finished request. It names each new request's
*intended* start, so that latency can be counted from when a request should have been sent, whatever
the client was doing at that moment.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self


def portion(whole: int, index: int, count: int) -> int:
    """Return the part of `whole` that falls to `index` of `count`; all parts together are it."""
    return (whole + count - 1 - index) // count


class Pacer(Protocol):
    """Decides how many requests start now."""

    def due(self, elapsed_s: float, started: int, in_flight: int) -> Sequence[float]:
        """Return the intended start, in seconds of the run, of each request to start now."""
        ...

    def next_s(self, started: int) -> float | None:
        """Return the intended start of the next request; None if no clock decides it."""
        ...

    def over(self, elapsed_s: float, started: int) -> bool:
        """Return whether no request will start any more."""
        ...

    def share(self, index: int, count: int) -> Self:
        """Return the pacer of client process `index` of `count`; together they are this one."""
        ...


@dataclass(frozen=True, slots=True)
class Ramp:
    """A concurrency on straight lines between `(seconds, level)` points; the last level stays."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [at for at, _ in self.points]
        if not times or times != sorted(times):
            raise ValueError("a ramp needs points in the order of time")
        if min(level for _, level in self.points) < 0:
            raise ValueError("a ramp's level must not be negative")

    def level(self, elapsed_s: float) -> int:
        """Return the concurrency wanted at this moment, rounded."""
        before = self.points[0]
        for after in self.points:
            if elapsed_s < after[0]:
                share = (
                    (elapsed_s - before[0]) / (after[0] - before[0])
                    if after[0] > before[0]
                    else 1.0
                )
                return round(before[1] + max(share, 0.0) * (after[1] - before[1]))
            before = after
        return round(before[1])


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Keeps as many requests in flight as the ramp says, up to a number of requests or a duration.

    A request's intended start is the moment its place became free, which is now.
    """

    ramp: Ramp
    requests: int | None = None
    duration_s: float | None = None
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise ValueError("a run needs a number of requests or a duration")

    def due(self, elapsed_s: float, started: int, in_flight: int) -> Sequence[float]:
        """Return one `elapsed_s` for each free place."""
        if self.over(elapsed_s, started):
            return ()
        free = portion(self.ramp.level(elapsed_s), self.index, self.count) - in_flight
        if self.requests is not None:
            free = min(free, self.requests - started)
        return (elapsed_s,) * max(free, 0)

    def next_s(self, started: int) -> float | None:  # noqa: ARG002 - the protocol's signature
        """Return None: a place becomes free when an answer ends."""
        return None

    def over(self, elapsed_s: float, started: int) -> bool:
        """Return whether the requests are all started or the time is up."""
        if self.requests is not None and started >= self.requests:
            return True
        return self.duration_s is not None and elapsed_s >= self.duration_s

    def share(self, index: int, count: int) -> Self:
        """Return the loop of client process `index` of `count`: its places and its requests."""
        requests = None if self.requests is None else portion(self.requests, index, count)
        return replace(self, requests=requests, index=index, count=count)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Starts requests at given times, in seconds of the run, whatever becomes of the others."""

    times_s: Sequence[float] = field(repr=False)

    def due(self, elapsed_s: float, started: int, in_flight: int) -> Sequence[float]:  # noqa: ARG002
        """Return the times that have come and are not started."""
        return self.times_s[started : bisect_right(self.times_s, elapsed_s, started)]

    def next_s(self, started: int) -> float | None:
        """Return the time of the next request."""
        return self.times_s[started] if started < len(self.times_s) else None

    def over(self, elapsed_s: float, started: int) -> bool:  # noqa: ARG002
        """Return whether every time has come."""
        return started >= len(self.times_s)

    def share(self, index: int, count: int) -> Self:
        """Return every `count`th time."""
        return replace(self, times_s=self.times_s[index::count])
