"""One server's time per output token as a curve over its sequences in flight, learnt from windows.

Levels are remembered in half-octave buckets of load, so that what was seen at 4 sequences says
little about 64. A straight line a + b n through the buckets, fitted in relative error with a weak
prior of b = `slope_prior` * a, gives slope and extrapolation; each bucket then pulls the line
towards its own level by w / (w + `residual_weight`). Levels never fall with load: buckets that do
are averaged (pool adjacent violators).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.core.tuning import Tuning
from router.core.types import Estimate

# The relative noise of one window until it is measured, and the pace of the measurement.
NOISE_PRIOR = 0.05
_NOISE_PACE = 0.05
_NOISE_MAX = 0.3
# Of a normal distribution: standard deviation over mean absolute deviation.
_SIGMAS_PER_MEAN = 1.25
# A forecast with less behind it cannot be contradicted.
_FORECAST_WEIGHT_MIN = 0.25
# A change shows in at least so much evidence, and leaves what was known before this much weight.
_CHANGE_WEIGHT_MIN = 1.5
_CHANGE_SIGMAS = 4.0
_CHANGED_WEIGHT = 1.0
_REST_WEIGHT = 0.5
# So many windows in a row without a change bear out what they say.
_SETTLED_WEIGHT = 10.0
# What was given is believed again, of a server that nobody uses, after so long.
_PATIENCE_S, _PATIENCE_S_MAX = 90.0, 3600.0
# The prior slope counts as so many windows.
_PRIOR_WEIGHT = 0.3
# A slope may take at most this share of the level: the line passes above zero at no load.
_SLOPE_SHARE_MAX = 0.98
# For the slope at a load, what a level counts with each half octave that it is away.
_NEARBY = 0.8
_SEQUENCES_MAX = 100_000
_SECONDS_MIN, _SECONDS_MAX = 1e-6, 600.0
_MARGINALS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """A level that was seen: `seconds` per token at so many `sequences`, worth `weight` windows."""

    sequences: float
    seconds: float
    weight: float


@dataclass(slots=True)
class _Bucket:
    sequences: float
    seconds: float
    weight: float
    at: float


@dataclass(slots=True)
class _Run:
    """Windows in a row that were off the forecast on one side."""

    windows: int = 0
    weight: float = 0.0
    off_sum: float = 0.0


def _bucket(sequences: float) -> int:
    return round(2 * math.log2(max(sequences, 1.0)))


class Curve:
    """Time per output token by sequences in flight. All times in seconds."""

    def __init__(self, tuning: Tuning, points: Iterable[Point] = ()) -> None:
        self._tuning = tuning
        self._buckets: dict[int, _Bucket] = {}
        self._run = _Run()
        # Whether anything was seen or given.
        self.known = False
        self.changes = 0
        self.windows = 0
        self.noise = NOISE_PRIOR
        # None until the first window: what was given does not age before.
        self._now: float | None = None
        self._weights: dict[int, float] = {}
        self._base = self._slope = 0.0
        self._slopes: dict[int, float] = {}
        self._marginals: dict[int, tuple[float, float]] = {}
        self._loads: list[float] = []
        self._residuals: list[float] = []
        for point in points:
            self._remember(0.0, point.sequences, point.seconds, point.weight)
        self._fit()
        self._settled: Curve | None = None
        self._settled_points = self._given = self.points()
        self._unsettled_weight = 0.0
        self._unseen_s = 0.0
        self._patience_s = _PATIENCE_S

    @property
    def seems_faster(self) -> bool:
        """Whether the latest windows were off the forecast, and better than it."""
        return self._run.off_sum < 0

    def observe(self, now: float, sequences: float, seconds: float, weight: float) -> None:
        """Take a window's mean time per token at its mean load."""
        sound = _SECONDS_MIN <= seconds <= _SECONDS_MAX
        if not (sound and 0 < sequences <= _SEQUENCES_MAX and weight > 0):
            return
        self.windows += 1
        self._unseen_s = 0.0
        if self._now is None:
            for bucket in self._buckets.values():
                bucket.at = now
        changes = self.changes
        self._detect_change(sequences, seconds, weight)
        self._remember(now, sequences, seconds, weight)
        self._now = now
        self._fit()
        self._unsettled_weight += weight
        if self.changes > changes:
            self._unsettled_weight = weight
        elif self._unsettled_weight >= _SETTLED_WEIGHT:
            self._settled, self._settled_points = None, self.points()
            self._unsettled_weight = 0.0

    def settled(self) -> "Curve":
        """Return it as it was given or last borne out, without what the latest windows say."""
        if self._settled is None:
            self._settled = Curve(self._tuning, self._settled_points)
        return self._settled

    def unseen(self, elapsed_s: float) -> None:
        """Nothing was seen for so long. In the end what was not borne out is dropped; later, and
        each time after twice as long, that the server is much slower than it was given.

        A burst that was taken for a slower server would else be believed until it is seen again,
        which for a server that is believed to be slow may be never.
        """
        self._unseen_s += elapsed_s
        if self._unseen_s >= self._patience_s and self._slowed():
            self._patience_s = min(2 * self._patience_s, _PATIENCE_S_MAX)
            self._settled, self._settled_points = None, self._given
        elif self._unsettled_weight == 0 or self._unseen_s < self._tuning.memory_s:
            return
        self._unsettled_weight = 0.0
        settled = self.settled()
        for bucket in self._buckets.values():
            weight = settled.weight(bucket.sequences)
            if weight >= _FORECAST_WEIGHT_MIN:
                bucket.seconds = settled.seconds(bucket.sequences)
                bucket.weight = max(bucket.weight, weight)
        self._fit()

    def _slowed(self) -> bool:
        settled, share = self.settled(), 1 + self._tuning.change_share
        return any(settled.seconds(p.sequences) > share * p.seconds for p in self._given)

    def seconds(self, sequences: float) -> float:
        """Return the estimate at a load. Meaningless while nothing is known."""
        return (self._base + self._slope * sequences) * (1 + self._residual(sequences))

    def slope(self, sequences: float) -> float:
        """Return by how much one more sequence slows every token."""
        if self._tuning.pooled_slope:
            slope = self._local_slope(_bucket(sequences))
        else:
            slope = self.seconds(sequences + 1) - self.seconds(sequences)
        return min(max(slope, 0.0), _SLOPE_SHARE_MAX * self.seconds(sequences) / sequences)

    def marginal(self, sequences: int) -> tuple[float, float]:
        """Return `optimistic` and `slope` at a load: what a decision asks for, remembered."""
        found = self._marginals.get(sequences)
        if found is None:
            if len(self._marginals) >= _MARGINALS_MAX:
                self._marginals.clear()
            found = (self.optimistic(sequences), self.slope(sequences))
            self._marginals[sequences] = found
        return found

    def weight(self, sequences: float) -> float:
        """Return how many windows stand behind the estimate: less with each half octave away."""
        here = _bucket(sequences)
        return max((w * 0.25 ** abs(k - here) for k, w in self._weights.items()), default=0.0)

    def optimistic(self, sequences: float) -> float:
        """Return the estimate less what ignorance is worth."""
        optimism = self._tuning.optimism * max(1.0, self.noise / NOISE_PRIOR)
        share = optimism / math.sqrt(self.weight(sequences) + 0.1)
        return self.seconds(sequences) * (1 - min(share, 3 * self._tuning.optimism))

    def seen_at(self, sequences: float) -> float | None:
        """Return when about this load was last seen, None if never."""
        bucket = self._buckets.get(_bucket(sequences))
        return None if bucket is None else bucket.at

    def estimate(self, sequences: float) -> Estimate:
        """Return the estimate with its band."""
        value = self.seconds(sequences)
        share = 1.96 * self.noise / math.sqrt(self.weight(sequences) + 0.05)
        return Estimate(value, value * max(0.0, 1 - share), value * (1 + share))

    def points(self) -> list[Point]:
        """Return what is remembered, by ascending load, with the weight that age has left."""
        return [
            Point(bucket.sequences, bucket.seconds, self._faded(bucket))
            for _, bucket in sorted(self._buckets.items())
        ]

    def _faded(self, bucket: _Bucket) -> float:
        """Return a bucket's weight by now. A rest of it stays: old evidence is better than none."""
        age_s = 0.0 if self._now is None else max(0.0, self._now - bucket.at)
        kept = math.exp(-age_s / self._tuning.memory_s)
        rest = min(bucket.weight, _REST_WEIGHT)
        return rest + (bucket.weight - rest) * kept

    def _detect_change(self, sequences: float, seconds: float, weight: float) -> None:
        """Rescale all levels when windows in a row are off on one side, by more than the noise."""
        if self.weight(sequences) < _FORECAST_WEIGHT_MIN:
            return
        off = seconds / self.seconds(sequences) - 1
        noise = min(abs(off), _NOISE_MAX) * math.sqrt(weight)
        self.noise += _NOISE_PACE * (_SIGMAS_PER_MEAN * noise - self.noise)
        run = self._run
        if abs(off) <= self._tuning.change_share or off * run.off_sum < 0:
            self._run = run = _Run()
        if abs(off) <= self._tuning.change_share:
            return
        run.windows += 1
        run.weight += weight
        run.off_sum += weight * off
        if run.windows < self._tuning.change_windows or run.weight < _CHANGE_WEIGHT_MIN:
            return
        mean_off = run.off_sum / run.weight
        if abs(mean_off) < _CHANGE_SIGMAS * self.noise / math.sqrt(run.weight):
            return
        self._run = _Run()
        for bucket in self._buckets.values():
            changed = bucket.seconds * (1 + mean_off)
            bucket.seconds = min(max(changed, _SECONDS_MIN), _SECONDS_MAX)
            bucket.weight = min(bucket.weight, _CHANGED_WEIGHT)
        self.changes += 1

    def _remember(self, now: float, sequences: float, seconds: float, weight: float) -> None:
        key = _bucket(sequences)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = _Bucket(sequences, seconds, weight, now)
            return
        kept = bucket.weight * math.exp(-max(0.0, now - bucket.at) / self._tuning.memory_s)
        gain = weight / (kept + weight)
        bucket.sequences += gain * (sequences - bucket.sequences)
        # The harmonic mean: of windows of one length it is their time over all of their tokens,
        # while the mean of ratios would count the luckless ones for too much.
        bucket.seconds = 1 / (1 / bucket.seconds + gain * (1 / seconds - 1 / bucket.seconds))
        bucket.weight = min(kept + weight, self._tuning.weight_max)
        bucket.at = now

    def _fit(self) -> None:
        points = self.points()
        if not points:
            return
        self.known = True
        self._weights = {key: self._faded(bucket) for key, bucket in self._buckets.items()}
        self._slopes = {}
        self._marginals = {}
        self._base, self._slope = _line(points, self._tuning.slope_prior)
        levels = _never_falling(points)
        half = self._tuning.residual_weight if self._tuning.pooled_slope else 0.0
        self._loads = [point.sequences for point in points]
        self._residuals = [
            (level / (self._base + self._slope * point.sequences) - 1)
            * point.weight
            / (point.weight + half)
            for level, point in zip(levels, points, strict=True)
        ]

    def _local_slope(self, key: int) -> float:
        """Return the slope of the line through the levels, those nearby counting most."""
        slope = self._slopes.get(key)
        if slope is None:
            points = [
                Point(b.sequences, b.seconds, self._weights[k] * _NEARBY ** abs(k - key))
                for k, b in sorted(self._buckets.items())
            ]
            slope = self._slopes[key] = _line(points, self._tuning.slope_prior)[1]
        return slope

    def _residual(self, sequences: float) -> float:
        loads, residuals = self._loads, self._residuals
        at = bisect_left(loads, sequences)
        if at == 0:
            return residuals[0]
        if at == len(loads):
            return residuals[-1]
        share = (sequences - loads[at - 1]) / (loads[at] - loads[at - 1])
        return residuals[at - 1] + share * (residuals[at] - residuals[at - 1])


def _line(points: Sequence[Point], slope_prior: float) -> tuple[float, float]:
    """Fit a + b n in relative error: each point says a / T + b n / T = 1, the prior b = prior a."""
    aa = ab = bb = ya = yb = 0.0
    for point in points:
        u, v, w = 1 / point.seconds, point.sequences / point.seconds, point.weight
        aa += w * u * u
        ab += w * u * v
        bb += w * v * v
        ya += w * u
        yb += w * v
    last = points[-1]
    scale = last.sequences / last.seconds
    aa += _PRIOR_WEIGHT * (slope_prior * scale) ** 2
    ab -= _PRIOR_WEIGHT * slope_prior * scale * scale
    bb += _PRIOR_WEIGHT * scale * scale
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        base = points[0].seconds / (1 + slope_prior * points[0].sequences)
        return base, slope_prior * base
    base = (ya * bb - yb * ab) / determinant
    slope = (aa * yb - ab * ya) / determinant
    if slope < 0:
        return ya / aa, 0.0
    if base <= 0:
        base = 0.05 * points[0].seconds
        weight = sum(point.weight for point in points)
        slope = sum(p.weight * max(p.seconds - base, 0.0) / p.sequences for p in points) / weight
    return base, slope


def _never_falling(points: Sequence[Point]) -> list[float]:
    """Average neighbours until levels do not fall: the nearest such sequence in squared error."""
    pools: list[tuple[float, float, int]] = []
    for point in points:
        seconds, weight, count = point.seconds, point.weight, 1
        while pools and pools[-1][0] > seconds:
            before, before_weight, before_count = pools.pop()
            total = before_weight + weight
            seconds = (before * before_weight + seconds * weight) / total
            weight, count = total, count + before_count
        pools.append((seconds, weight, count))
    return [seconds for seconds, _, count in pools for _ in range(count)]
