"""Two thresholds and a dwell: the only way anything here changes its mode.

The router feeds it requests in flight and seconds; the engine plugin feeds it running requests and
decode steps. The clock is whatever the caller counts in, as long as it never runs backwards.
"""

from dataclasses import dataclass
from enum import StrEnum


class Move(StrEnum):
    """What an update did, and why it did not do more."""

    STAY = "stay"
    SWITCH = "switch"
    HELD = "held"


@dataclass(slots=True)
class Hysteresis:
    """A latch: high above `up`, low at or below `down`, and in each state for at least `dwell`.

    Between the thresholds it keeps its state. The first change is not held back by the dwell. With
    `leaves_low_at_once` only the high state dwells: where the low one is ruinous above `up`, that
    bounds the changes as well, to two a dwell.
    """

    up: float
    down: float
    dwell: float = 0.0
    leaves_low_at_once: bool = False
    high: bool = False
    switches: int = 0
    _since: float | None = None

    def __post_init__(self) -> None:
        if self.down > self.up:
            raise ValueError(f"down ({self.down}) must not exceed up ({self.up})")
        if self.dwell < 0:
            raise ValueError(f"dwell ({self.dwell}) must not be negative")

    def update(self, value: float, now: float) -> Move:
        """Take a reading; switch if it lies beyond the other threshold and the dwell has passed."""
        want = value > self.down if self.high else value > self.up
        if want == self.high:
            return Move.STAY
        held = self.high or not self.leaves_low_at_once
        if held and self._since is not None and now - self._since < self.dwell:
            return Move.HELD
        self.high = want
        self._since = now
        self.switches += 1
        return Move.SWITCH
