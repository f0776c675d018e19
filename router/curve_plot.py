"""A small plot in text: speed over sequences in flight, one letter for each curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

COLUMNS = 57
ROWS = 12
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (sequences, tokens a second of one of them) in the order of their sequences.

    `letter` draws it; `now` is the load that its server has, None while that is nothing.
    """

    letter: str
    points: Sequence[tuple[float, float]]
    now: float | None = None

    def speed(self, sequences: float) -> float | None:
        """Return the speed at a load, between its points; None beyond them."""
        if not self.points or not self.points[0][0] <= sequences <= self.points[-1][0]:
            return None
        before = self.points[0]
        for after in self.points:
            if sequences <= after[0]:
                break
            before = after
        if after[0] == before[0]:
            return after[1]
        share = log(sequences / before[0]) / log(after[0] / before[0])
        return exp(log(before[1]) * (1 - share) + log(after[1]) * share)


def plot(curves: Sequence[Curve]) -> list[str]:
    """Return the lines of the plot; capitals mark where servers are now. Empty without curves."""
    top = max((speed for curve in curves for _, speed in curve.points), default=0.0)
    if top <= 0:
        return []
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    for curve in curves:
        for column in range(COLUMNS):
            speed = curve.speed(_load(column))
            if speed is not None:
                cell = _row(speed, top)
                taken = grid[cell][column]
                grid[cell][column] = curve.letter if taken == " " else "*"
    for curve in curves:
        if curve.now is not None:
            now = min(max(curve.now, LOADS[0]), LOADS[-1])
            speed = curve.speed(now)
            if speed is not None:
                grid[_row(speed, top)][_column(now)] = curve.letter.upper()
    lines = [f"{_label(row, top):>8} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    return [*lines, f"{'':8} +{'-' * COLUMNS}", f"{'':8}  {_axis()}"]


def _load(column: int) -> float:
    return exp(log(LOADS[-1]) * column / (COLUMNS - 1))


def _column(load: float) -> int:
    return round(log(load) / log(LOADS[-1]) * (COLUMNS - 1))


def _row(speed: float, top: float) -> int:
    return min(ROWS - 1, max(0, round((1 - speed / top) * (ROWS - 1))))


def _label(row: int, top: float) -> str:
    """Label the top, the middle and the bottom."""
    if row in (0, ROWS // 2):
        return f"{top * (1 - row / (ROWS - 1)):.0f}"
    return "0" if row == ROWS - 1 else ""


def _axis() -> str:
    cells = [" "] * (COLUMNS + 2)
    for load in LOADS:
        for offset, digit in enumerate(str(load)):
            cells[_column(load) + offset] = digit
    return "".join(cells).rstrip()
