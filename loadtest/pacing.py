"""When requests start. Pure: elapsed seconds in, intended start times out.

A pacer is asked at every tick and after every finished request. It names each new request's
*intended* start, so that latency can be counted from when a request should have been sent, whatever
the client was doing at that moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Pacer(Protocol):
    """Decides how many requests start now."""

    def due(self, elapsed_s: float, started: int, in_flight: int) -> Sequence[float]:
        """Return the intended start, in seconds of the run, of each request to start now."""
        ...

    def over(self, elapsed_s: float, started: int) -> bool:
        """Return whether no request will start any more."""
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

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise ValueError("a run needs a number of requests or a duration")

    def due(self, elapsed_s: float, started: int, in_flight: int) -> Sequence[float]:
        """Return one `elapsed_s` for each free place."""
        if self.over(elapsed_s, started):
            return ()
        free = self.ramp.level(elapsed_s) - in_flight
        if self.requests is not None:
            free = min(free, self.requests - started)
        return (elapsed_s,) * max(free, 0)

    def over(self, elapsed_s: float, started: int) -> bool:
        """Return whether the requests are all started or the time is up."""
        if self.requests is not None and started >= self.requests:
            return True
        return self.duration_s is not None and elapsed_s >= self.duration_s
