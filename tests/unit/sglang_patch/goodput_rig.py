"""An engine of known step times and accept length, driven by a switch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_patch.config import GOODPUT, Config
from sglang_patch.goodput import GoodputRule
from sglang_patch.rule import Mode, Rule
from sglang_patch.step_times import Curve, StepTimes
from sglang_patch.switch import Switch

ACCEPT_MAX = 4
# A chain of three on a large GPU, in round figures: see the tables in docs/engine.md.
CHAIN = StepTimes(
    on=Curve((1, 64, 128, 256), (0.0065, 0.0107, 0.0176, 0.032), 2.5e-8),
    off=Curve((1, 64, 128, 256), (0.005, 0.0066, 0.0086, 0.0122), 2.5e-8),
)


def make_switch(rule: Rule, clock: Callable[[], float] = lambda: 0.0) -> Switch:
    switch = Switch(Config(None, None, policy=GOODPUT), clock)
    switch.follow(rule)
    return switch


def make_rule(times: StepTimes = CHAIN, **more: object) -> GoodputRule:
    return GoodputRule(times, ACCEPT_MAX, dwell_steps=16, **more)  # type: ignore[arg-type]


@dataclass
class Bench:
    """Decode steps of one engine; its clock runs by what the steps take."""

    rule: Rule
    truth: StepTimes = CHAIN
    accept: float = 2.2
    stalls: random.Random | None = None
    now_s: float = 0.0
    tokens: float = 0.0
    step: int = 0
    modes: list[Mode] = field(default_factory=list)
    switch: Switch = field(init=False)

    def __post_init__(self) -> None:
        self.switch = make_switch(self.rule, lambda: self.now_s)

    def run(self, steps: int, running: int, context_tokens: int = 0) -> list[Mode]:
        """Run decode steps of one batch; return their modes."""
        for _ in range(steps):
            self.step += 1
            mode = self.switch.decide(running, 1 << 20, 64, self.step, context_tokens)
            self.now_s += self.truth.predict(mode, running, context_tokens)
            if self.stalls is not None and self.stalls.random() < 0.05:
                self.now_s += 0.5
            tokens = self.accept * running if mode is Mode.ON else running
            self.tokens += tokens
            self.switch.finished(mode, running, round(tokens), graph_missed=False)
            self.modes.append(mode)
        return self.modes[-steps:]

    def best(self, running: int, context_tokens: int = 0) -> Mode:
        """The mode that is truly faster."""
        on, off = (self.truth.predict(mode, running, context_tokens) for mode in Mode)
        return Mode.ON if self.accept > on / off else Mode.OFF
