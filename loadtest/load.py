"""A load: what is sent where and when. Plain data, the same for every client process."""

from dataclasses import dataclass, replace
from typing import Self

from loadtest.pacing import ClosedLoop, Pacer, Ramp, portion
from loadtest.target import Target
from loadtest.workload import Workload


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Requests sent before the measured ones, so many at once; no figure counts them."""

    requests: int = 0
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """One load. `runner.run_load` puts it on its targets.

    `cut_s` ends the run at that time whatever still streams; else it waits for the last request.
    Several targets take turns. The client that is given it starts the conversations `first`,
    `first + stride`, `first + 2 stride`, ...
    """

    targets: tuple[Target, ...]
    workload: Workload
    pacer: Pacer
    cut_s: float | None = None
    idle_timeout_s: float = 120.0
    warmup: WarmUp = WarmUp()
    first: int = 0
    stride: int = 1

    def share(self, index: int, count: int) -> Self:
        """Return what client process `index` of `count` does of this load."""
        warmup = WarmUp(
            portion(self.warmup.requests, index, count),
            max(portion(self.warmup.concurrency, index, count), 1),
        )
        pacer = self.pacer.share(index, count)
        return replace(self, pacer=pacer, warmup=warmup, first=index, stride=count)

    def warming(self) -> Self:
        """Return the load that is the warm-up: conversations of its own, numbered below 0."""
        level = Ramp(((0.0, float(self.warmup.concurrency)),))
        pacer = ClosedLoop(level, requests=self.warmup.requests)
        return replace(
            self,
            pacer=pacer,
            cut_s=None,
            warmup=WarmUp(),
            first=-1 - self.first,
            stride=-self.stride,
        )
