"""What was lately seen, by batch size. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

FADE = 0.98
"""What is left of a batch size's evidence after one round."""
MEDIAN_WINDOW = 15
"""Values that a median is taken of: stalls count for nothing while they are fewer than half."""


def bucket(running: int) -> int:
    """Return the power of two at or above a batch size: 1, 2, 4, ..."""
    return 1 << max(0, running - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Figures:
    """Estimates by batch bucket, and the one for all others: None if nothing was ever seen."""

    overall: float | None = None
    buckets: Mapping[int, float] = field(default_factory=dict)

    def at(self, running: int) -> float | None:
        """Return the estimate at a batch size."""
        return self.buckets.get(bucket(running), self.overall)


@dataclass(slots=True)
class Evidence:
    """A moving average over the latest `window` of weight."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float, window: float) -> None:
        """Take a value."""
        self.weight = min(window, self.weight + weight)
        self.value += (value - self.value) * min(1.0, weight / self.weight)


@dataclass(slots=True)
class Means:
    """Averages by batch bucket, each drawn to that of all batches by `prior` of weight, since a
    bucket may have been seen little, or long ago.
    """

    window: float
    prior: float
    _overall: Evidence = field(default_factory=Evidence)
    _buckets: dict[int, Evidence] = field(default_factory=dict)

    def add(self, running: int, value: float, weight: float) -> None:
        """Take a value that was seen at a batch size."""
        self._overall.add(value, weight, self.window)
        self._buckets.setdefault(bucket(running), Evidence()).add(value, weight, self.window)

    def fade(self) -> None:
        """Let a round pass."""
        for evidence in self._buckets.values():
            evidence.weight *= FADE

    def figures(self) -> Figures:
        """Return the estimates of now."""
        if not self._overall.weight:
            return Figures()
        overall, prior = self._overall.value, self.prior
        return Figures(
            overall,
            {
                size: (own.value * own.weight + overall * prior) / (own.weight + prior)
                for size, own in self._buckets.items()
            },
        )


def _latest() -> deque[float]:
    return deque(maxlen=MEDIAN_WINDOW)


@dataclass(slots=True)
class Medians:
    """The same of values with outliers. What a bucket last showed holds until it shows more; of
    those that showed nothing, the middle one of the others speaks: a table may be wrong for one
    batch size alone.
    """

    _buckets: dict[int, deque[float]] = field(default_factory=dict)

    def add(self, running: int, value: float) -> None:
        """Take a value that was seen at a batch size."""
        self._buckets.setdefault(bucket(running), _latest()).append(value)

    def figures(self) -> Figures:
        """Return the estimates of now, of buckets with enough values to see a stall by."""
        enough = {
            size: median(values)
            for size, values in self._buckets.items()
            if 2 * len(values) > MEDIAN_WINDOW
        }
        return Figures(median(enough.values()) if enough else None, enough)
