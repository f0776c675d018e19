"""Whether the next decode step speculates: pure, and the code that simulations run, too.

Every tensor-parallel rank decides for itself and all must decide alike, or their collectives no
longer match. So a rule sees only what the ranks share: its clock is the count of decode steps,
never a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.core.hysteresis import Hysteresis

HEADROOM = 2
"""Speculation resumes only where this many times what an ON step reserves is free."""
SHARE_STEPS = 64
"""Decode steps between two proposals."""

_MASK = (1 << 64) - 1


class Mode(StrEnum):
    """What one decode step is: draft and verify, or one token a request."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class BatchView:
    """One decode batch as all ranks see it: after finished requests left, before memory is
    reserved.

    `step` counts decode steps since the engine started. `kv_free_tokens` are free or evictable;
    `kv_on_tokens` is what an ON step of this batch would reserve; `context_tokens` is the length of
    all its requests together.
    """

    step: int
    running: int
    kv_free_tokens: int
    kv_on_tokens: int
    context_tokens: int = 0


class Rule(ABC):
    """Chooses the mode of each decode step. Called once per step, with steps in order.

    What a rule learns it only proposes: at every SHARE_STEPS-th step, all ranks adopt what the
    first one proposes.
    """

    __slots__ = ()

    @abstractmethod
    def decide(self, view: BatchView) -> Mode:
        """Return the mode of the step that `view` describes."""

    def timed(self, mode: Mode, running: int, context_tokens: int, seconds: float) -> None:  # noqa: B027
        """Take the wall time of a step whose neighbours had its mode."""

    def yielded(self, mode: Mode, running: int, tokens: int, *, stale: bool) -> None:  # noqa: B027
        """Take what a step yielded; `stale` if OFF steps have left the draft behind."""

    def propose(self) -> Any:
        """Return what this rank has learnt, None if rules of this kind learn nothing."""
        return None

    def adopt(self, learnt: Any) -> None:  # noqa: B027
        """Decide by what the first rank proposed."""

    def report(self, running: int, context_tokens: int) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return what the next decision rests on beside the configuration, for people to read."""
        return None


def has_room(view: BatchView, mode: Mode) -> bool:
    """Tell whether an ON step may follow a step of this mode: after an OFF step only with
    HEADROOM, since it would make the engine retract requests.
    """
    spare = HEADROOM if mode is Mode.OFF else 1
    return view.kv_on_tokens * spare <= view.kv_free_tokens


@dataclass(slots=True)
class ThresholdRule(Rule):
    """OFF above `disable_above` running requests, ON again at or below `enable_at`.

    OFF lasts `dwell_steps` at least; ON ends at once, since an ON step of a full batch takes
    several times as long as an OFF step. A step whose ON reservation does not fit is OFF whatever
    the batch size, since it would make the engine retract requests; after such a step, speculation
    waits for HEADROOM times its reservation.
    """

    disable_above: int
    enable_at: int
    dwell_steps: int
    _latch: Hysteresis = field(init=False)
    _mode: Mode = field(init=False, default=Mode.ON)

    def __post_init__(self) -> None:
        self._latch = Hysteresis(
            up=self.disable_above,
            down=self.enable_at,
            dwell=self.dwell_steps,
            leaves_low_at_once=True,
        )

    def decide(self, view: BatchView) -> Mode:
        """Return the mode by batch size, ON only where the KV pool has room for it."""
        self._latch.update(view.running, view.step)
        on = has_room(view, self._mode) and not self._latch.high
        self._mode = Mode.ON if on else Mode.OFF
        return self._mode


@dataclass(frozen=True, slots=True)
class ScheduledRule(Rule):
    """Forces the mode by step number: for tests and measurements.

    `period` 0 is one mode for ever (`first`); K alternates every K steps, beginning with `first`;
    None draws each step from `seed`.
    """

    period: int | None
    first: Mode = Mode.ON
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "ScheduledRule":
        """Read `on`, `off`, `every:K` or `random:SEED`; ValueError says what is allowed."""
        if text in (Mode.ON, Mode.OFF):
            return cls(period=0, first=Mode(text))
        kind, _, number = text.partition(":")
        if kind == "every" and number.isdecimal() and int(number) > 0:
            return cls(period=int(number))
        if kind == "random" and number.isdecimal():
            return cls(period=None, seed=int(number))
        raise ValueError(f"{text!r} is not one of on, off, every:K (K >= 1), random:SEED")

    def decide(self, view: BatchView) -> Mode:
        """Return the mode of this step number, whatever the batch."""
        if self.period is None:
            flip = _scramble(self.seed + view.step) & 1
        else:
            flip = view.step // self.period & 1 if self.period else 0
        other = Mode.OFF if self.first is Mode.ON else Mode.ON
        return other if flip else self.first


def _scramble(value: int) -> int:
    """Mix 64 bits (the finalizer of SplitMix64), so that neighbouring steps are unrelated."""
    value = (value + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
