"""A calibration's plan and its points. Pure: seconds and rows in, points of the file out.

One closed loop climbs all levels like a staircase: no level waits for the one before to drain.
After each rise it settles, and then a stretch is measured as the router measures its servers:
seconds of X
TTFT points come from requests sent one at a time to an idle server, grouped by their prompt tokens:
under load a request waits for the step under way as well, which is not prefill.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from loadtest.bootstrap import Samples, interval
from loadtest.pacing import Ramp
from loadtest.record import RequestRow
from loadtest.stats import token_counts
from loadtest.steady import Stretch, part, stretch, total
from router.core.calibration import Interference, TpotPoint, TtftPoint

# Shares of the budget: both staircases, both series of single requests, both servers at once.
_STAIRS_SHARE, _SINGLES_SHARE, _TOGETHER_SHARE = 0.78, 0.10, 0.12
_SETTLE_SHARE = 0.4
_RISE_SHARE = 0.6
# A level's time goes with this negative power of it.
_LOW_LEVELS_POWER = 0.25
HOLD_S_MIN = 1.0
BLOCKS = 8
PROBE_TOKENS = (64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Hold:
    """One level of a staircase and the stretch that counts, in seconds."""

    level: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """How the budget is spent; seconds are engine time."""

    levels: tuple[int, ...]
    holds_s: tuple[float, ...]
    singles_s: float
    together_s: float

    @property
    def together_level(self) -> int:
        """The level at which both servers work at once."""
        return self.levels[len(self.levels) // 2]


def plan(levels: tuple[int, ...], budget_s: float) -> CalibrationPlan:
    """Share out the budget; ValueError if it is too short for so many levels."""
    weights = [level**-_LOW_LEVELS_POWER for level in levels]
    second_s = budget_s * _STAIRS_SHARE / 2 / sum(weights)
    if second_s * weights[-1] < HOLD_S_MIN:
        needed_s = math.ceil(budget_s * HOLD_S_MIN / (second_s * weights[-1]))
        raise ValueError(
            f"{budget_s:g} s are too short for {len(levels)} levels: {needed_s} s at least, or "
            f"fewer levels"
        )
    return CalibrationPlan(
        levels=levels,
        holds_s=tuple(second_s * weight for weight in weights),
        singles_s=budget_s * _SINGLES_SHARE / 2,
        together_s=budget_s * _TOGETHER_SHARE,
    )


def staircase(
    levels: Sequence[int], holds_s: Sequence[float], clock: float = 1.0
) -> tuple[Ramp, list[Hold]]:
    """Return the load and the stretches, in wall seconds, of holds in engine time.

    Each rise is gradual, so that requests go out of step.
    """
    points: list[tuple[float, float]] = [(0.0, 1.0)]
    holds = []
    start_s = 0.0
    for level, hold_s in zip(levels, holds_s, strict=True):
        settle_s, end_s = hold_s / clock * _SETTLE_SHARE, start_s + hold_s / clock
        points += [(start_s + settle_s * _RISE_SHARE, float(level)), (end_s, float(level))]
        holds.append(Hold(level, start_s + settle_s, end_s))
        start_s = end_s
    return Ramp(tuple(points)), holds


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """What one hold gave, in engine time: all of it, its blocks, and its requests' parts."""

    level: int
    whole: Stretch
    blocks: tuple[Stretch, ...]
    requests: tuple[Stretch, ...]

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of one sequence."""
        return _tpot_s(self.whole)

    def point(self, seed: int, mode: str | None) -> TpotPoint:
        """Return it as a point of the calibration file."""
        s = self.tpot_s
        bands = [
            interval((parts,), lambda of: _tpot_s(total(of[0], 1.0)), seed)
            for parts in (self.blocks, self.requests)
        ]
        known = [band for band in bands if band is not None]
        return TpotPoint(
            sequences=round(self.whole.sequences, 3),
            s=s,
            low_s=min([s, *(band.low for band in known)]),
            high_s=max([s, *(band.high for band in known)]),
            windows=round(self.whole.seconds, 1),  # the router's weights are seconds of evidence
            mode=mode,
        )


def _tpot_s(of: Stretch) -> float:
    assert of.tpot_s is not None
    return of.tpot_s


def level_figures(
    rows: Sequence[RequestRow], holds: Iterable[Hold], measured_s: float, clock: float
) -> list[LevelFigures]:
    """Return the figures of each hold that ended within `measured_s`; holds are wall seconds."""
    counts = token_counts(rows)
    found = []
    for hold in holds:
        if hold.end_s > measured_s * 1.001:
            continue
        block_s = (hold.end_s - hold.start_s) / BLOCKS
        edges_s = [hold.start_s + i * block_s for i in range(BLOCKS + 1)]
        blocks = [stretch(rows, a, b, counts) for a, b in pairwise(edges_s)]
        parts = [
            part(row, tokens, hold.start_s, hold.end_s)
            for row, tokens in zip(rows, counts, strict=True)
        ]
        whole = total(blocks, hold.end_s - hold.start_s)
        if whole.tpot_s is not None:
            found.append(
                LevelFigures(
                    level=hold.level,
                    whole=whole.on_clock(clock),
                    blocks=tuple(b.on_clock(clock) for b in blocks if b.decode_tokens),
                    requests=tuple(p.on_clock(clock) for p in parts if p.decode_tokens),
                )
            )
    return found


def ttft_points(rows: Iterable[RequestRow], clock: float, seed: int) -> tuple[TtftPoint, ...]:
    """Return TTFT by prompt tokens, of requests that were sent one at a time."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.prompt_tokens and row.first_s is not None:
            half_octave = round(2 * math.log2(row.prompt_tokens))
            sample = (float(row.prompt_tokens), (row.first_s - row.sent_s) * clock)
            groups.setdefault(half_octave, []).append(sample)
    return tuple(_ttft_point(group, seed) for _, group in sorted(groups.items()))


def _ttft_point(group: Sequence[tuple[float, float]], seed: int) -> TtftPoint:
    seconds = [second for _, second in group]
    middle_s = median(seconds)
    band = interval((seconds,), lambda samples: median(samples[0]), seed)
    low_s, high_s = (min(seconds), max(seconds)) if band is None else (band.low, band.high)
    tokens = fmean(tokens for tokens, _ in group)
    return TtftPoint(round(tokens, 1), middle_s, min(low_s, middle_s), max(high_s, middle_s))


def interference(
    alone: Mapping[str, LevelFigures], together: Mapping[str, LevelFigures], seed: int
) -> Interference | None:
    """Return how much longer a token takes while both work: the mean of both servers' ratios.

    None if one of them was not measured.
    """
    names = sorted(alone.keys() & together.keys())
    if len(names) < 2:
        return None
    samples = [f.blocks for name in names for f in (together[name], alone[name])]

    def slowdown(of: Samples[Stretch]) -> float:
        times_s = [_tpot_s(total(blocks, 1.0)) for blocks in of]
        ratios = [busy / idle for busy, idle in zip(times_s[::2], times_s[1::2], strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))

    value = slowdown(samples)
    band = interval(samples, slowdown, seed)
    low, high = (value, value) if band is None else (band.low, band.high)
    return Interference(value, min(low, value), max(high, value))
