"""Speculates while a step yields more tokens a second so: pure, as all rules.

An ON step of a batch takes t_on and yields A tokens a request, an OFF step t_off and one token. So
ON is the faster mode where A > t_on / t_off, the break-even. Both times depend on batch size and
context; A depends on what is being written.

Ranks measure different times. What a rule has measured is therefore only proposed: at every
SHARE_STEPS-th step all ranks take over the proposal of the first one, and decide by that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.core.hysteresis import Hysteresis
from sglang_patch.estimates import Figures, Means, Medians
from sglang_patch.rule import BatchView, Mode, Rule, has_room
from sglang_patch.step_times import StepTimes

MARGIN = 0.03
"""Speculation resumes only where it gains this share; it ends where it gains nothing."""
PROBE_STEPS = 8
PROBE_PERIOD_STEPS = 512
PROBE_BUDGET = 0.0025
"""Share of all time that trying out the mode that seems slower may cost."""
PROBE_NEAR = 0.25
"""OFF is tried out only where ON seems to gain no more than this."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What decisions rest on beside the table: tokens per request and ON step, and by how much
    steps of each mode take longer than the table says.
    """

    accept: Figures = field(default_factory=Figures)
    slowness: Mapping[Mode, Figures] = field(
        default_factory=lambda: {mode: Figures() for mode in Mode}
    )


@dataclass(slots=True)
class GoodputRule(Rule):
    """ON where the accept length exceeds the break-even, with a margin to come back.

    `accept_max` is the most tokens that a step can yield a request. While nothing is known of the
    accept length, it is taken for that: being wrong costs the steps until it is known. `fixed`
    takes the times as they are, and tries nothing out.
    """

    times: StepTimes
    accept_max: float
    dwell_steps: int
    fixed: bool = False
    learnt: Learnt = field(default_factory=Learnt)
    _accept: Means = field(default_factory=lambda: Means(window=4000, prior=200))
    _slowness: dict[Mode, Medians] = field(
        default_factory=lambda: {mode: Medians() for mode in Mode}
    )
    _latch: Hysteresis = field(init=False)
    _mode: Mode = field(init=False, default=Mode.ON)
    _last_accepting: Mode | None = field(init=False, default=None)
    _probed_at: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._latch = Hysteresis(
            up=1.0, down=1 / (1 + MARGIN), dwell=self.dwell_steps, leaves_low_at_once=True
        )

    def decide(self, view: BatchView) -> Mode:
        """Return the mode with more tokens a second, ON only where the KV pool has room for it."""
        break_even = self.break_even(view.running, view.context_tokens)
        cost = break_even / self.accept_length(view.running)
        self._latch.update(cost, view.step)
        off = self._latch.high
        if self._probes(view.step, break_even, cost):
            off = not off
        self._mode = Mode.OFF if off or not has_room(view, self._mode) else Mode.ON
        return self._mode

    def break_even(self, running: int, context_tokens: int) -> float:
        """Return the accept length from which speculation pays."""
        return self.step_s(Mode.ON, running, context_tokens) / self.step_s(
            Mode.OFF, running, context_tokens
        )

    def step_s(self, mode: Mode, running: int, context_tokens: int) -> float:
        """Return the expected time of a step in seconds."""
        slowness = self.learnt.slowness[mode].at(running) or 1.0
        return self.times.predict(mode, running, context_tokens) * slowness

    def accept_length(self, running: int) -> float:
        """Return the expected tokens per request and ON step."""
        known = self.learnt.accept.at(running)
        return self.accept_max if known is None else known

    def _probes(self, step: int, break_even: float, cost: float) -> bool:
        """Tell whether to try out the other mode, of which nothing is learnt meanwhile.

        The more it seems to lose, the rarer: what is lost stays within the budget. ON is never
        tried where even a draft that is always right would not pay.
        """
        off = self._latch.high
        loss = cost - 1 if off else 1 / cost - 1
        if self.fixed or (break_even > self.accept_max if off else loss > PROBE_NEAR):
            return False
        since = step - self._probed_at
        if since >= max(PROBE_PERIOD_STEPS, PROBE_STEPS * loss / PROBE_BUDGET):
            self._probed_at, since = step, 0
        return since < PROBE_STEPS <= step

    def timed(self, mode: Mode, running: int, context_tokens: int, seconds: float) -> None:
        """Take the wall time of a steady step."""
        if not self.fixed:
            expected_s = self.times.predict(mode, running, context_tokens)
            self._slowness[mode].add(running, seconds / expected_s)

    def yielded(self, mode: Mode, running: int, tokens: int, *, stale: bool) -> None:
        """Take what a step yielded: of ON steps that follow one, with a draft in step."""
        warm = mode is Mode.ON and self._last_accepting is Mode.ON and not stale
        self._last_accepting = mode
        if warm and running:
            self._accept.add(running, tokens / running, weight=running)

    def propose(self) -> Learnt:
        """Return what this rank has measured, and let older evidence of acceptance fade."""
        self._accept.fade()
        return Learnt(
            self._accept.figures(),
            {mode: medians.figures() for mode, medians in self._slowness.items()},
        )

    def adopt(self, learnt: Any) -> None:
        """Decide by this from now on."""
        self.learnt = learnt

    def report(self, running: int, context_tokens: int) -> Mapping[str, Any]:
        """Return what the next decision rests on."""
        return {
            "break_even": round(self.break_even(running, context_tokens), 3),
            "accept_length": round(self.accept_length(running), 3),
            "accept_length_by_batch": _rounded(self.learnt.accept.buckets),
            "t_on_ms": round(1e3 * self.step_s(Mode.ON, running, context_tokens), 3),
            "t_off_ms": round(1e3 * self.step_s(Mode.OFF, running, context_tokens), 3),
            "slowness": {
                str(mode): _rounded(each.buckets) for mode, each in self.learnt.slowness.items()
            },
        }


def _rounded(buckets: Mapping[int, float]) -> dict[str, float]:
    return {str(size): round(value, 3) for size, value in sorted(buckets.items())}
