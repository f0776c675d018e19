"""Whether a server may be sent work: what probes, requests and tokens say, weighed.

    UNKNOWN --probe ok--> UP --failed probes in a row--> UNRESPONSIVE --probe ok or token--> UP
                          UP --transport errors--> UNREACHABLE --probe ok--> UP

Unresponsive is not dead: an engine answers probes late while it is in a long prefill. So a token
that flowed a moment ago outweighs a failed probe, and an unresponsive server may still be tried
when there is no other. A transport error is a connection that was refused or broke. One may be a
stale keep-alive connection; two within a window, with no sign of life between them, are not. An
answer of any status, 503 and 429 included, shows that the server lives, and is never reported here;
whether the answers are any good is the breaker's to say.

A server that was away and returns is taken for cold, and its share of the work grows step by step.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.breaker import Breaker, Verdict

# A server that has returned starts with so many sequences; at the end of its slow start it has so
# many times as many, and then all that the policy sends.
_COLD_SEQUENCES = 4
_WARM_RATIO = 32.0


class HealthState(StrEnum):
    """What is believed of a server. A closed set: state pages, logs and tests use these words."""

    UNKNOWN = "unknown"
    UP = "up"
    UNRESPONSIVE = "unresponsive"
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class ServerHealth:
    """One server's health. Methods take monotonic seconds and return whether the state changed.

    `context_length` is in tokens, None until the server has told it.
    """

    failed_probes_max: int = 3
    transport_errors_max: int = 2
    transport_window_s: float = 10.0
    token_grace_s: float = 30.0
    context_length: int | None = None
    state: HealthState = HealthState.UNKNOWN
    since: float | None = None
    last_error: str | None = None
    last_token_at: float | None = None
    failed_probes: int = 0
    transport_errors: int = 0
    returned_at: float | None = None
    breaker: Breaker = field(default_factory=Breaker)
    _transport_error_at: float = 0.0

    @property
    def up(self) -> bool:
        """Whether it may be sent work. False until the first good probe."""
        return self.state is HealthState.UP

    def probe_ok(self, now: float) -> bool:
        """Take a good probe: up, whatever was before."""
        self.failed_probes = 0
        self.transport_errors = 0
        return self._become(HealthState.UP, now)

    def probe_failed(self, now: float, error: str) -> bool:
        """Take a failed probe. It counts only if no token flowed within the grace time."""
        self.last_error = error
        if self.last_token_at is not None and now - self.last_token_at <= self.token_grace_s:
            return False
        self.failed_probes += 1
        if self.state is not HealthState.UP or self.failed_probes < self.failed_probes_max:
            return False
        return self._become(HealthState.UNRESPONSIVE, now)

    def transport_error(self, now: float, error: str) -> bool:
        """Take a refused or broken connection. Enough of them within the window: unreachable."""
        self.last_error = error
        before = self._transport_error_at
        forgiven = self.last_token_at is not None and self.last_token_at > before
        if forgiven or now - before > self.transport_window_s:
            self.transport_errors = 0
        self.transport_errors += 1
        self._transport_error_at = now
        if self.state is HealthState.UNKNOWN or self.transport_errors < self.transport_errors_max:
            return False
        return self._become(HealthState.UNREACHABLE, now)

    def token(self, at: float) -> bool:
        """Take note that data flowed, the latest of it `at`, which may be a moment ago.

        Called about once a second; for every chunk, `last_token_at` is set and nothing else done.
        """
        self.last_token_at = at
        self.failed_probes = 0
        if at >= self._transport_error_at:
            self.transport_errors = 0
        # A dead server's last bytes may be read after others saw it break: no way back up.
        return self.state is HealthState.UNRESPONSIVE and self._become(HealthState.UP, at)

    def judged(self, verdict: Verdict, now: float, error: str | None, *, trial: bool) -> bool:
        """Take what an attempt says of the server; return whether its breaker changed.

        `error` is what failed, `trial` what the breaker's `begin` returned.
        """
        if verdict is Verdict.FAILURE:
            self.last_error = error
        changed = self.breaker.end(verdict, now, trial=trial)
        if changed and self.breaker.admits:
            self.returned_at = now
        return changed

    def is_cold(self, sequences: int, now: float, slow_start_s: float) -> bool:
        """Whether it has come back so short a time ago that so many sequences are too many.

        Once the slow start is over, its return is forgotten.
        """
        if self.returned_at is None:
            return False
        if now - self.returned_at >= slow_start_s:
            self.returned_at = None
            return False
        warmth = max(0.0, now - self.returned_at) / slow_start_s
        return sequences > _COLD_SEQUENCES * math.pow(_WARM_RATIO, warmth)

    def _become(self, state: HealthState, now: float) -> bool:
        if state is self.state:
            return False
        # One that is up at the first question has been up before the router was.
        was_away = self.state is HealthState.UNREACHABLE or (
            self.state is HealthState.UNKNOWN and self.last_error is not None
        )
        if state is HealthState.UP and was_away:
            self.returned_at = now
        self.state = state
        self.since = now
        return True
