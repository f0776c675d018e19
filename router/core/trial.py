"""A look at the role that is not in charge of shared GPUs, at half of the load.

A change to a role that was never seen at about this load might be two changes, each of which costs
a drain. So half of the load goes there first, for as long as it takes to see how fast it is, and
the role in charge stays so. Time per token does not fall with load: a server that at half of the
load is slower than the other one with all of it would be so with all of it, too. Where requests
come whatever happens, it must at its part make the tokens of all of them and some more, since it
may make no more with more in flight. What both lose by working at once is known (interference.py).
"""

import math
from collections.abc import Sequence

from router.core.learner import Learner, ServerModel
from router.core.types import Role, ServerLoad

# The first generation of requests shares one burst of prefill: look after that, if it ends soon.
_AFTER_S_MIN, _AFTER_S_MAX = 3.0, 15.0
_AFTER_LIFETIMES = 2.0
_LENGTH_S_MAX = 30.0
# Requests that come whatever happens pile up meanwhile.
_OPEN_LENGTH_S_MAX = 10.0
_HEADROOM = 1.25
_SEEN_WEIGHT = 6.0
_UNSEEN_WEIGHT = 0.5
# So many windows tell: alone there is no hurry, as nothing is slowed.
_BESIDE_WEIGHT = 1.0
_ALONE_WEIGHT = 8.0


class Trial:
    """Decides when to look, which requests take part, and what it has shown."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._until: float | None = None
        self._tried: set[tuple[Role, int]] = set()

    @property
    def on(self) -> bool:
        """Whether it is under way."""
        return self._until is not None

    def begin(self, here: ServerModel, there: ServerModel, sequences: float, now: float) -> bool:
        """Begin if the other role was never seen at about this load and may be faster: once per
        octave of load and role, and not where a calibration says what is.
        """
        learner = self._learner
        key = (there.role, round(math.log2(sequences)))
        if (
            key in self._tried
            or learner.calibrated
            or learner.tuning.explore_share <= 0
            or learner.traffic.observed_s < self._after_s()
            or here.curve(sequences).weight(sequences) < _SEEN_WEIGHT
            or there.curve(sequences).weight(sequences) >= _UNSEEN_WEIGHT
        ):
            return False
        if there.known:
            hoped = there.curve(sequences).optimistic(sequences)
            if hoped * (1 + learner.tuning.switch_gain) > here.curve(sequences).seconds(sequences):
                return False
        self._tried.add(key)
        self._until = now + (_LENGTH_S_MAX if learner.traffic.closed else _OPEN_LENGTH_S_MAX)
        return True

    def _after_s(self) -> float:
        lifetimes_s = _AFTER_LIFETIMES * self._learner.traffic.lifetime_s
        return min(max(lifetimes_s, _AFTER_S_MIN), _AFTER_S_MAX)

    def takes(self, there: ServerModel, loads: Sequence[ServerLoad], sequences: int) -> bool:
        """Whether a request of so many sequences goes to the other role."""
        total = sum(load.sequences for load in loads)
        return 2 * _moved(there, loads) < total + sequences

    def verdict(
        self, here: ServerModel, there: ServerModel, loads: Sequence[ServerLoad], now: float
    ) -> bool | None:
        """Return whether the other role is to be in charge; None while it has not shown enough."""
        traffic = self._learner.traffic
        if traffic.closed:
            seconds = self._seen_s(there, loads)
            total = max(1, sum(load.sequences for load in loads))
            better = None if seconds is None else seconds < here.curve(total).seconds(total)
        else:
            better = self._most_tok_s(there) >= _HEADROOM * traffic.tokens_per_s or None
        if better is None and self._until is not None and now >= self._until:
            better = False
        if better is not None:
            self._until = None
        return better

    def _most_tok_s(self, there: ServerModel) -> float:
        """Return the most tokens a second that the other role was seen to make, were it alone."""
        slowdown = self._learner.interference().slowdown
        rates = [0.0]
        for curve, slower in ((there.alone, 1.0), (there.beside, slowdown)):
            points = [point for point in curve.points() if point.weight >= _BESIDE_WEIGHT]
            rates += [slower * point.sequences / point.seconds for point in points]
        return max(rates)

    def _seen_s(self, there: ServerModel, loads: Sequence[ServerLoad]) -> float | None:
        """Return the time per token of the other role at its part of the load, None if unseen."""
        moved = max(1, _moved(there, loads))
        total = max(1, sum(load.sequences for load in loads))
        if moved < total // 2:
            return None
        alone, beside = there.curve(moved), there.beside
        if alone.known and alone.weight(moved) >= _ALONE_WEIGHT:
            return alone.seconds(moved)
        if beside.known and beside.weight(moved) >= _BESIDE_WEIGHT:
            return beside.seconds(moved) / self._learner.interference().slowdown
        return None


def _moved(there: ServerModel, loads: Sequence[ServerLoad]) -> int:
    return sum(load.sequences for load in loads if load.role is there.role)
