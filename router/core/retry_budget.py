"""How many requests may be sent a second time: a share of the recent ones.

Without a bound, servers that refuse because they are full get each request twice, and are fuller.
"""

from dataclasses import dataclass

PERIOD_S = 10.0
# So that a router with little traffic can retry at all.
FLOOR = 3


@dataclass(slots=True)
class RetryBudget:
    """Counts requests and retries of this period of 10 s and of the one before.

    `share` is how many of the requests may be retried, from 0 (none at all) to 1.
    """

    share: float = 0.2
    _period_ends: float = 0.0
    _requests: int = 0
    _requests_before: int = 0
    _retries: int = 0
    _retries_before: int = 0

    def request(self, now: float) -> None:
        """Count a request. Called once for each."""
        if now >= self._period_ends:
            self._turn(now)
        self._requests += 1

    def take(self, now: float) -> bool:
        """Take a retry from the budget; False, and nothing taken, if there is none left."""
        if now >= self._period_ends:
            self._turn(now)
        requests = self._requests + self._requests_before
        allowed = max(FLOOR, self.share * requests) if self.share else 0
        if self._retries + self._retries_before + 1 > allowed:
            return False
        self._retries += 1
        return True

    def _turn(self, now: float) -> None:
        recent = now < self._period_ends + PERIOD_S
        self._requests_before = self._requests if recent else 0
        self._retries_before = self._retries if recent else 0
        self._requests = self._retries = 0
        self._period_ends = now + PERIOD_S
