"""One look at a server alone, where both have had work all the time.

Servers that are declared to have GPUs of their own, but share them, look the same as slower ones as
long as both are busy. So once, and again much later, new requests go to one server only until the
other has drained.

Where clients wait for their answers that costs rate while it lasts: it is done where one server is
nearly as good as both, or requests are short, and what it is taken to lose must fit into a budget
that grows with time. Where requests come whatever happens, those that one server cannot carry pile
up: it is done in a lull, and given up when more are in flight than usual.
"""

import math
from collections.abc import Sequence

from router.core.learner import Learner
from router.core.types import ServerLoad

_AFTER_S = 8.0
_LENGTH_S_MAX = 20.0
_AGAIN_S = 600.0
_WEIGHT = 1.0
# The budget in seconds of full rate at the start; `explore_share` of the time comes on top.
_BUDGET_S = 1.5
_DRAIN_LIFETIMES = 1.3
# Shares of the mean in flight: a lull, and where a look that was begun in one is given up. The next
# lull may be used after a while.
_LULL = 0.6
_PILE = 1.1
_RETRY_S = 10.0


class Contrast:
    """Decides when one server is held back, and which one stays."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._began_at: float | None = None
        self._looked_at = 0.0
        self._rest_until = -math.inf
        self._until = 0.0
        self._load_before = self._load_max = 0.0
        self._kept: str | None = None

    def kept(self, loads: Sequence[ServerLoad], now: float) -> str | None:
        """Return the server that gets all requests now, None while there is no trial."""
        if self._kept is not None:
            points = self._learner.servers[self._kept].alone.points()
            seen = any(p.weight >= _WEIGHT and p.sequences >= self._load_before for p in points)
            piled = sum(load.sequences for load in loads) > self._load_max
            if seen or piled or now > self._until:
                self._kept = None
                self._rest_until = now + (_RETRY_S if piled else _AGAIN_S)
            return self._kept
        if self._began_at is None:
            self._began_at = self._looked_at = now
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self._consider(loads, now, now - self._began_at)
        return self._kept

    def _consider(self, loads: Sequence[ServerLoad], now: float, elapsed_s: float) -> None:
        learner = self._learner
        busy = [load for load in loads if load.sequences]
        if learner.tuning.explore_share <= 0 or elapsed_s < _AFTER_S or now < self._rest_until:
            return
        if len(busy) < 2 or learner.contrast_known:
            return
        total = sum(load.sequences for load in busy)
        best = min(busy, key=lambda load: _seconds(learner, load, total))
        traffic = learner.traffic
        if traffic.closed:
            rate = sum(load.sequences / _seconds(learner, load, load.sequences) for load in busy)
            lost_share = max(0.0, 1 - total / _seconds(learner, best, total) / rate)
            lost_s = lost_share * _DRAIN_LIFETIMES * traffic.lifetime_s
            affordable = lost_s <= _BUDGET_S + learner.tuning.explore_share * elapsed_s
            self._load_max = math.inf
        else:
            affordable = total <= _LULL * traffic.sequences
            self._load_max = _PILE * traffic.sequences
        if affordable:
            self._kept = best.name
            self._load_before = best.sequences
            self._until = now + _LENGTH_S_MAX


def _seconds(learner: Learner, load: ServerLoad, sequences: int) -> float:
    server = learner.servers[load.name]
    return server.curve(sequences).seconds(sequences)
