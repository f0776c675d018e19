"""Requests to a server that nobody would choose, so that its recovery is noticed: few of them."""

from router.core.tuning import Tuning

# No more than so many may be saved up.
_CREDIT_MAX = 2.0


class Exploration:
    """Grants a probe where a server is idle and was not seen for a while, within a budget."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._credit = 0.0
        self._last_at: float | None = None
        self.probes = 0

    def earn(self) -> None:
        """Count a request."""
        self._credit = min(_CREDIT_MAX, self._credit + self._tuning.explore_share)

    def due(self, last_seen_at: float | None, now: float) -> bool:
        """Whether an idle server last seen then may have a request now."""
        interval_s = self._tuning.explore_interval_s
        if self._credit < 1:
            return False
        rested = self._last_at is None or now - self._last_at > interval_s
        return rested and (last_seen_at is None or now - last_seen_at > interval_s)

    def spend(self, now: float) -> None:
        """Take a probe."""
        self._credit -= 1
        self._last_at = now
        self.probes += 1
