"""How long a decode step takes in each mode, by batch size and by the context that it reads. Pure.

A step reads the weights once, computes for each request, and reads the KV cache of all of them. So
its time is taken as a curve over the batch size, by linear interpolation, and one slope over the
context tokens of the whole batch.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sglang_patch.rule import Mode

CONTEXT_SPREAD_MIN_TOKENS = 1024
"""Contexts of one batch size that lie closer together say nothing about a slope."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    mode: Mode
    running: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Step times of one mode: `seconds` at `batches` without context, and seconds a context
    token.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    context_token_s: float = 0.0

    def __post_init__(self) -> None:
        figures = (*self.seconds, 1 + self.context_token_s)
        if (
            not self.batches
            or len(self.batches) != len(self.seconds)
            or list(self.batches) != sorted({size for size in self.batches if size > 0})
            or not all(math.isfinite(figure) and figure > 0 for figure in figures)
            or self.context_token_s < 0
        ):
            raise ValueError("needs growing batch sizes, a positive time for each, and a slope")

    def predict(self, running: int, context_tokens: int) -> float:
        """Return the time of a step in seconds; beyond the last batch size by its last rise."""
        return self._at(running) + self.context_token_s * context_tokens

    def _at(self, running: int) -> float:
        batches, seconds = self.batches, self.seconds
        if running <= batches[0] or len(batches) == 1:
            return seconds[0]
        right = min(bisect_left(batches, running), len(batches) - 1)
        low, high = batches[right - 1], batches[right]
        rise = (seconds[right] - seconds[right - 1]) / (high - low)
        if running > high:
            return seconds[right] + max(0.0, rise) * (running - high)
        return seconds[right - 1] + rise * (running - low)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Both modes."""

    on: Curve
    off: Curve

    def predict(self, mode: Mode, running: int, context_tokens: int) -> float:
        """Return the time of a step in seconds."""
        curve = self.on if mode is Mode.ON else self.off
        return curve.predict(running, context_tokens)

    def dump(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            str(mode): {
                "seconds": {
                    str(size): each for size, each in zip(curve.batches, curve.seconds, strict=True)
                },
                "context_token_s": curve.context_token_s,
            }
            for mode, curve in ((Mode.ON, self.on), (Mode.OFF, self.off))
        }

    @classmethod
    def load(cls, value: Any) -> "StepTimes":
        """Read what `dump` wrote; ValueError where it is something else."""
        try:
            return cls(*(_load_curve(value[str(mode)]) for mode in (Mode.ON, Mode.OFF)))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no step times: {error!r}") from None


def _load_curve(value: Mapping[str, Any]) -> Curve:
    points = sorted((int(size), float(each)) for size, each in value["seconds"].items())
    batches, seconds = zip(*points, strict=True) if points else ((), ())
    return Curve(batches, seconds, float(value.get("context_token_s", 0.0)))


def fit(samples: Iterable[Sample]) -> StepTimes:
    """Make curves of measured steps: medians, so that a stall counts for nothing.

    ValueError where a mode has no sample. The slope is that of the batch size that was measured
    with the most different contexts.
    """
    modes: dict[Mode, list[Sample]] = defaultdict(list)
    for sample in samples:
        modes[sample.mode].append(sample)
    return StepTimes(_fit_curve(modes[Mode.ON]), _fit_curve(modes[Mode.OFF]))


def _fit_curve(samples: list[Sample]) -> Curve:
    sizes: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        sizes[sample.running].append(sample)
    if not sizes:
        raise ValueError("no step was measured")
    slope = _slope(max(sizes.values(), key=_apart))
    batches = tuple(sorted(sizes))
    without_context = (
        median(each.seconds - slope * each.context_tokens for each in sizes[size])
        for size in batches
    )
    shortest = min(each.seconds for each in samples)
    return Curve(batches, tuple(max(each, shortest / 2) for each in without_context), slope)


def _apart(group: list[Sample]) -> int:
    contexts = [each.context_tokens for each in group]
    return max(contexts) - min(contexts)


def _slope(group: list[Sample]) -> float:
    """Return the seconds that a context token adds; 0 where the contexts are much the same."""
    middle = min(each.context_tokens for each in group) + _apart(group) / 2
    short = [each for each in group if each.context_tokens <= middle]
    long = [each for each in group if each.context_tokens > middle]
    if _apart(group) < CONTEXT_SPREAD_MIN_TOKENS:
        return 0.0
    tokens = [median(each.context_tokens for each in part) for part in (short, long)]
    seconds = [median(each.seconds for each in part) for part in (short, long)]
    return max(0.0, (seconds[1] - seconds[0]) / (tokens[1] - tokens[0]))
