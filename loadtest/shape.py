"""The notation of a concurrency or rate over time: `16`, `1..64/60`, `1/20,64/20,1/20`."""

import math
import re
from dataclasses import dataclass

from loadtest.pacing import Ramp

_PIECE = re.compile(r"(?P<start>[0-9.]+?)(\.\.(?P<end>[0-9.]+))?(/(?P<seconds>[0-9.]+))?")
ALLOWED = "LEVEL, LEVEL/SECONDS or FROM..TO/SECONDS, several with commas between: 1/20,1..64/60"
SECONDS_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A level over time. `duration_s` is None if the last level has no end."""

    ramp: Ramp
    duration_s: float | None

    @property
    def highest(self) -> float:
        """The highest level."""
        return max(level for _, level in self.ramp.points)


def parse_shape(text: str, *, high: float) -> Shape:
    """Read a shape with levels above 0 and up to `high`; ValueError says what is allowed.

    A level of 0 is taken for a pause, in a piece that has seconds. Only the last piece may have
    none.
    """
    points: list[tuple[float, float]] = []
    at_s = 0.0
    pieces = text.split(",")
    for number, piece in enumerate(pieces, start=1):
        found = _PIECE.fullmatch(piece.strip())
        if found is None:
            raise ValueError(f"{piece.strip()!r} is no load: {ALLOWED}")
        start = _number(found["start"], high)
        end = start if found["end"] is None else _number(found["end"], high)
        points.append((at_s, start))
        if found["seconds"] is None:
            if number < len(pieces) or found["end"] is not None or start == 0:
                raise ValueError(f"{piece.strip()!r} needs its seconds: {ALLOWED}")
            return Shape(Ramp(tuple(points)), None)
        at_s += _number(found["seconds"], SECONDS_MAX)
        points.append((at_s, end))
    if at_s == 0 or all(level == 0 for _, level in points):
        raise ValueError(f"{text!r} asks for nothing: {ALLOWED}")
    return Shape(Ramp(tuple(points)), at_s)


def _number(text: str, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
    if not math.isfinite(value) or not 0 <= value <= high:
        raise ValueError(f"{text} is not within 0 to {high:g}")
    return value
