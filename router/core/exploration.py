"""Requests to a server that nobody would choose, so that its recovery is noticed: few of them.

An unlucky look at a load would else be the last one, on a busy server as on an idle one.

The budget is in requests' worth of predicted loss: a probe that is taken to cost half as much again
as the best choice loses half a request. So near ties may be probed often, ruinous ones rarely.
"""

import math

from router.core.tuning import Tuning

# No more than so many requests' worth may be saved up, and a probe costs at least so much.
_CREDIT_MAX = 2.0
_LOSS_MIN = 0.1
_LOOK_S = 0.1


class Exploration:
    """Grants a probe where a server is idle and was not seen for a while, within a budget."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._credit = 0.0
        self._last_at: float | None = None
        self._look_at = -math.inf

    def earn(self) -> None:
        """Count a request."""
        self._credit = min(_CREDIT_MAX, self._credit + self._tuning.explore_share)

    def looks(self, now: float) -> bool:
        """Whether to look for a server that is due: a few times a second, if anything is left."""
        if self._credit < _LOSS_MIN or now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return True

    def due(self, last_seen_at: float | None, now: float, *, promising: bool) -> bool:
        """Whether an idle server last seen then should have a request now.

        A `promising` one has just been faster than expected: it need not wait.
        """
        if self._tuning.explore_share <= 0:
            return False
        interval_s = self._tuning.explore_interval_s
        rested = self._last_at is None or now - self._last_at > interval_s
        return promising or (rested and (last_seen_at is None or now - last_seen_at > interval_s))

    def spend(self, loss: float, now: float) -> bool:
        """Take a probe of so much predicted loss, in requests; False if it is too much."""
        loss = max(loss, _LOSS_MIN)
        if loss > self._credit:
            return False
        self._credit -= loss
        self._last_at = now
        return True
