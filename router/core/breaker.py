"""Whether a server that answers, but badly, is left alone for a while.

    CLOSED --failures in a row--> OPEN --its time is over--> HALF_OPEN --trial good--> CLOSED
                                  OPEN <-----trial bad------ HALF_OPEN

A failure is a connection that broke under a request, or a status of 5xx that says that the server
failed. An overload (429, 503), a 4xx, a timeout in a long queue and a client that leaves say
nothing: they count neither way. A server that accepts no connection at all is its health's concern.
The breaker only gives advice: whoever asks still uses a server that it is against if no other is
left, because a bad server is better than none.
"""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """A closed set: metrics, state pages and logs use these words."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(StrEnum):
    """What an attempt says of its server."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


@dataclass(slots=True)
class Breaker:
    """One server's breaker. Times are monotonic seconds; methods return whether `state` changed.

    It opens at `failures_max` failures in a row, each within `window_s` of the last; 0 turns it
    off, and closes it at the next tick. It stays open for `open_s`, twice as long after each failed
    trial, `open_s_max` at most. `admits`: it is for sending the server a request now; half open,
    one at a time. `opened_s` is for how long it was opened last.
    """

    failures_max: int = 5
    window_s: float = 30.0
    open_s: float = 5.0
    open_s_max: float = 60.0
    state: BreakerState = BreakerState.CLOSED
    admits: bool = True
    failures: int = 0
    opened_total: int = 0
    opened_s: float = 0.0
    _failed_at: float = 0.0
    _open_until: float = 0.0

    def begin(self) -> bool:
        """Take note that an attempt begins. True: it is the trial, until `end` is told of it."""
        if self.state is not BreakerState.HALF_OPEN or not self.admits:
            return False
        self.admits = False
        return True

    def end(self, verdict: Verdict, now: float, *, trial: bool) -> bool:
        """Take an attempt's end, or a trial's first token. `trial` is what `begin` returned.

        While it is not closed only the trial counts: what else ends was begun before, or had no
        other server to go to.
        """
        if not self.failures_max:
            return self._close()
        if trial:
            self.admits = verdict is not Verdict.FAILURE
            if verdict is Verdict.SUCCESS:
                self._close()
            elif verdict is Verdict.FAILURE:
                self._open(now, min(2 * self.opened_s, self.open_s_max))
            return verdict is not Verdict.NEUTRAL
        if self.state is not BreakerState.CLOSED:
            return False
        if verdict is Verdict.SUCCESS:
            self.failures = 0
        elif verdict is Verdict.FAILURE:
            if now - self._failed_at > self.window_s:
                self.failures = 0
            self.failures += 1
            self._failed_at = now
            if self.failures >= self.failures_max:
                self._open(now, self.open_s)
                return True
        return False

    def tick(self, now: float) -> bool:
        """Go on to the trial if it is time; close if turned off. Called about once a second."""
        if not self.failures_max:
            return self._close()
        if self.state is not BreakerState.OPEN or now < self._open_until:
            return False
        self.state = BreakerState.HALF_OPEN
        self.admits = True
        return True

    def _close(self) -> bool:
        was = self.state
        self.state = BreakerState.CLOSED
        self.admits = True
        self.failures = 0
        return was is not BreakerState.CLOSED

    def _open(self, now: float, seconds: float) -> None:
        self.state = BreakerState.OPEN
        self.admits = False
        self.opened_total += 1
        self.opened_s = seconds
        self._open_until = now + seconds
