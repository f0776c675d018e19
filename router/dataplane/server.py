"""One engine server: its connections, its health, its tokens, and what is said of it in the log."""

import logging
from dataclasses import dataclass

from router.core.breaker import Breaker, BreakerState, Verdict
from router.core.health import ServerHealth
from router.core.tokens import TokenModel
from router.core.types import ServerSpec
from router.dataplane.auth import NO_CREDENTIALS, Credentials
from router.dataplane.upstream import Pool, UpstreamError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine server and all that the data plane holds of it."""

    spec: ServerSpec
    pool: Pool
    health: ServerHealth
    tokens: TokenModel
    credentials: Credentials = NO_CREDENTIALS

    def judged(self, verdict: Verdict, now: float, error: str | None, *, trial: bool) -> None:
        """Take note of how an attempt ended; say so if that has changed the breaker."""
        if self.health.judged(verdict, now, error, trial=trial):
            self._tell(self.health.breaker)

    def tick(self, now: float) -> None:
        """Let time pass for the breaker. Called about once a second."""
        if self.health.breaker.tick(now):
            self._tell(self.health.breaker)

    def _tell(self, breaker: Breaker) -> None:
        name = self.spec.name
        match breaker.state:
            case BreakerState.OPEN:
                why, pause_s = self.health.last_error, breaker.opened_s
                logger.warning("server %s: breaker open for %g s: %s", name, pause_s, why)
            case BreakerState.HALF_OPEN:
                logger.info("server %s: breaker half open, the next request is a trial", name)
            case BreakerState.CLOSED:
                logger.info("server %s: breaker closed", name)

    def failed(self, now: float, error: UpstreamError) -> None:
        """Take note that a connection was refused; say so if the server is out by it."""
        if self.health.transport_error(now, str(error)):
            logger.warning("server %s is %s: %s", self.spec.name, self.health.state, error)
