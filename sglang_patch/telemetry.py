"""What the switch did, in plain numbers. Pure: the caller brings the times."""

from dataclasses import dataclass, field
from typing import Any

from sglang_patch.estimates import bucket
from sglang_patch.rule import Mode

ALPHA = 0.05
"""Weight of one step in the moving averages."""
OUTLIER = 10.0
"""A step that takes this many times the average is a stall, not a step time."""

SYNCS = ("full", "resume", "end")
"""Why the draft caught up: no room for another OFF step, an ON step is next, requests ended."""


@dataclass(slots=True)
class Average:
    """A moving average that begins as a plain mean; None until the first value."""

    value: float | None = None
    count: int = 0

    def add(self, sample: float) -> None:
        """Take a sample."""
        self.count += 1
        weight = max(ALPHA, 1 / self.count)
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)


@dataclass(slots=True)
class ModeCounters:
    """Totals of one mode. `seconds` is wall time from the start of a decode step to the next."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    graph_misses: int = 0
    step_s: dict[int, Average] = field(default_factory=dict)


@dataclass(slots=True)
class Telemetry:
    """Counters of one engine process.

    Acceptance is counted in ON steps only, and only while the draft is in step with the target:
    figures that hold OFF steps tend to 1 and say nothing about the draft.
    """

    modes: dict[Mode, ModeCounters] = field(
        default_factory=lambda: {mode: ModeCounters() for mode in Mode}
    )
    switches: int = 0
    direct_steps: int = 0
    deferred_positions: int = 0
    draft_syncs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SYNCS, 0))
    accept: Average = field(default_factory=Average)
    draft_stale: bool = False

    @property
    def steps(self) -> int:
        """Decode steps of both modes."""
        return sum(counters.steps for counters in self.modes.values())

    def started(self, mode: Mode) -> None:
        """Count a decode step."""
        self.modes[mode].steps += 1

    def timed(self, mode: Mode, running: int, seconds: float, *, steady: bool) -> bool:
        """Take the wall time of one step; True if it enters the step times.

        Only steady steps do (same mode before and after, no prefill between), and no stalls.
        """
        counters = self.modes[mode]
        counters.seconds += seconds
        average = counters.step_s.setdefault(bucket(running), Average())
        if not steady or (average.value is not None and seconds > OUTLIER * average.value):
            return False
        average.add(seconds)
        return True

    def finished(self, mode: Mode, running: int, tokens: int, *, graph_missed: bool) -> None:
        """Take what a step yielded: tokens of all its requests together."""
        counters = self.modes[mode]
        counters.tokens += tokens
        counters.graph_misses += graph_missed
        if mode is Mode.ON and not self.draft_stale and running:
            self.accept.add(tokens / running)

    def step_ms(self, mode: Mode, running: int | None = None) -> float | None:
        """Return the step time at a batch size (the nearest bucket seen), or over all of them if
        None.
        """
        times = {
            size: avg for size, avg in self.modes[mode].step_s.items() if avg.value is not None
        }
        if not times:
            return None
        if running is None:
            count = sum(average.count for average in times.values())
            return 1e3 * sum((avg.value or 0.0) * avg.count for avg in times.values()) / count
        nearest = min(times, key=lambda size: (abs(size - bucket(running)), size))
        return 1e3 * (times[nearest].value or 0.0)

    def table(self) -> dict[str, dict[str, float]]:
        """Return step times in ms by mode and batch bucket."""
        return {
            str(mode): {
                str(size): round(1e3 * average.value, 3)
                for size, average in sorted(counters.step_s.items())
                if average.value is not None
            }
            for mode, counters in self.modes.items()
        }

    def summary(self, running: int) -> dict[str, Any]:
        """Return the figures that the load metrics carry."""
        steps = self.steps
        t_on, t_off = self.step_ms(Mode.ON, running), self.step_ms(Mode.OFF, running)
        return {
            "off_share": round(self.modes[Mode.OFF].steps / steps, 4) if steps else 0.0,
            "switches_total": self.switches,
            "direct_steps": self.direct_steps,
            "deferred_positions": self.deferred_positions,
            "draft_syncs": dict(self.draft_syncs),
            "accept_length_on": None if self.accept.value is None else round(self.accept.value, 3),
            "t_on_ms": None if t_on is None else round(t_on, 3),
            "t_off_ms": None if t_off is None else round(t_off, 3),
            "steps": {str(mode): counters.steps for mode, counters in self.modes.items()},
            "tokens": {str(mode): counters.tokens for mode, counters in self.modes.items()},
            "seconds": {str(mode): round(c.seconds, 3) for mode, c in self.modes.items()},
            "graph_misses": {str(mode): c.graph_misses for mode, c in self.modes.items()},
            "step_ms": self.table(),
        }
