"""One look at a server alone, where both have had work all the time.

Servers that are declared to have GPUs of their own, but share them, look the same as slower ones as
long as both are busy. So once, and again much later, new requests go to one server only until the
other has drained. It is affordable where one server is nearly as good as both, or requests are
short; what it is taken to lose must fit into a budget that grows with time.
"""

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


class Contrast:
    """Decides when one server is held back, and which one stays."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._began_at: float | None = None
        self._looked_at: float | None = None
        self._ended_at: float | None = None
        self._until = 0.0
        self._kept: str | None = None

    def kept(self, loads: Sequence[ServerLoad], now: float) -> str | None:
        """Return the server that gets all requests now, None while there is no trial."""
        if self._kept is not None:
            server = self._learner.servers[self._kept]
            seen = server.alone.weight(_sequences(loads, self._kept)) >= _WEIGHT
            if seen or now > self._until:
                self._kept = None
                self._ended_at = now
            return self._kept
        if self._began_at is None:
            self._began_at = self._looked_at = now
        if self._looked_at is None or now - self._looked_at < 1.0:
            return None
        self._looked_at = now
        self._consider(loads, now)
        return self._kept

    def _consider(self, loads: Sequence[ServerLoad], now: float) -> None:
        learner, began = self._learner, self._began_at or now
        rested = self._ended_at is None or now - self._ended_at > _AGAIN_S
        busy = [load for load in loads if load.sequences]
        if learner.tuning.explore_share <= 0 or not rested or now - began < _AFTER_S:
            return
        if len(busy) < 2 or learner.contrast_known:
            return
        rate = sum(load.sequences / _seconds(learner, load, load.sequences) for load in busy)
        total = sum(load.sequences for load in busy)
        alone = {load.name: total / _seconds(learner, load, total) for load in busy}
        best = max(alone, key=alone.__getitem__)
        lost_share = max(0.0, 1 - alone[best] / rate)
        lost_s = lost_share * _DRAIN_LIFETIMES * learner.traffic.lifetime_s
        if lost_s <= _BUDGET_S + learner.tuning.explore_share * (now - began):
            self._kept = best
            self._until = now + _LENGTH_S_MAX


def _sequences(loads: Sequence[ServerLoad], name: str) -> int:
    """Return the sequences in flight on one server, at least 1."""
    return next((max(load.sequences, 1) for load in loads if load.name == name), 1)


def _seconds(learner: Learner, load: ServerLoad, sequences: int) -> float:
    server = learner.servers[load.name]
    return server.curve(sequences).seconds(sequences)
