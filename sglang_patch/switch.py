"""The switch of one engine process: it owns the mode, and knows whether it is really at work."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang_patch.config import Config
from sglang_patch.rule import SHARE_STEPS, BatchView, Mode, Rule
from sglang_patch.telemetry import Telemetry

logger = logging.getLogger(__name__)

ARMED_STEPS_MAX = 100
"""Decode steps after which a switch whose worker never called it counts as broken."""


class State(StrEnum):
    """How far the switch has come. Only `active` proves that it is in the worker that the server
    uses.
    """

    LOADED = "loaded"
    ARMED = "armed"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step that was decided: kept until the next one, to know what it took."""

    mode: Mode
    running: int
    context_tokens: int
    forward: int
    started_s: float
    steady: bool


@dataclass(slots=True)
class Switch:
    """Decides each step by `rule`, and keeps what becomes of it.

    `clock` (seconds) is this rank's own, so no decision depends on it before `share` has replaced
    what the rule learnt by what the first rank's has. `trace` takes one line of JSON.
    """

    config: Config
    clock: Callable[[], float]
    rank: int = 0
    state: State = State.LOADED
    reason: str | None = None
    trace: Callable[[str], object] | None = None
    share: Callable[[Any], Any] = lambda learnt: learnt
    telemetry: Telemetry = field(default_factory=Telemetry)
    mode: Mode = Mode.ON
    _rule: Rule = field(init=False)
    _last: Step | None = None

    def __post_init__(self) -> None:
        self._rule = self.config.make_rule()

    @property
    def off(self) -> bool:
        """Whether the current decode step is OFF."""
        return self.mode is Mode.OFF

    @property
    def broken(self) -> bool:
        """Whether steps have been decided that no worker asked about."""
        return self.state is State.ARMED and self.telemetry.steps > ARMED_STEPS_MAX

    def arm(self) -> None:
        """The worker is one that the switch knows, and all is in place."""
        self.state = State.ARMED

    def seen_in_worker(self) -> None:
        """A hooked method of the worker that the server uses has run."""
        if self.state is State.ARMED:
            self.state = State.ACTIVE
            logger.info("Speculation switch is active on rank %d.", self.rank)

    def follow(self, rule: Rule) -> None:
        """Decide by another rule from now on, and count anew."""
        self._rule, self._last = rule, None
        self.mode, self.telemetry = Mode.ON, Telemetry()

    def decide(
        self,
        running: int,
        kv_free_tokens: int,
        kv_on_tokens: int,
        forward: int,
        context_tokens: int = 0,
    ) -> Mode:
        """Decide the next decode step. `forward` is the number of batches that the engine has run
        so far.
        """
        now_s, last = self.clock(), self._last
        view = BatchView(
            self.telemetry.steps, running, kv_free_tokens, kv_on_tokens, context_tokens
        )
        if view.step % SHARE_STEPS == 0 and (proposal := self._rule.propose()) is not None:
            self._rule.adopt(self.share(proposal))
        mode = self._rule.decide(view)
        neighbours = last is not None and last.forward + 1 == forward
        if last is not None and neighbours:
            self._time(last, now_s - last.started_s, steady=last.steady and last.mode is mode)
        if mode is not self.mode:
            self.telemetry.switches += 1
            logger.debug("Step %d: %s -> %s, %d running.", view.step, self.mode, mode, running)
        steady = neighbours and last is not None and last.mode is mode
        self.mode, self._last = mode, Step(mode, running, context_tokens, forward, now_s, steady)
        self.telemetry.started(mode)
        if self.trace is not None:
            line = {"step": view.step, "rank": self.rank, "mode": mode, "batch": running}
            self.trace(json.dumps(line) + "\n")
        if self.broken and (self.telemetry.steps - 1) % ARMED_STEPS_MAX == 0:
            logger.error(
                "The speculation switch has decided %d decode steps, but the worker never ran its "
                "hooks: it has NO EFFECT. The server uses another worker than the plugin hooked.",
                self.telemetry.steps,
            )
        return mode

    def _time(self, step: Step, seconds: float, *, steady: bool) -> None:
        self.telemetry.timed(step.mode, step.running, seconds, steady=steady)
        if steady:
            self._rule.timed(step.mode, step.running, step.context_tokens, seconds)

    def finished(self, mode: Mode, running: int, tokens: int, *, graph_missed: bool) -> None:
        """Take the result of a decode step, which under overlap comes after the next decision."""
        if mode is Mode.OFF and self.config.skip_draft_extend:
            self.telemetry.draft_stale = True
        self.telemetry.finished(mode, running, tokens, graph_missed=graph_missed)
        self._rule.yielded(mode, running, tokens, stale=self.telemetry.draft_stale)

    def estimates(self) -> Mapping[str, Any] | None:
        """Return what the rule reckons with for the current batch, None if it learns nothing."""
        last = self._last
        return self._rule.report(last.running, last.context_tokens) if last else None

    def snapshot(self) -> dict[str, Any]:
        """Return the `spec_switch` object of `/v1/loads` and `/server_info`."""
        running = self._last.running if self._last else 0
        return {
            "policy": self.config.policy,
            "state": str(self.state),
            "mode": str(self.mode),
            "threshold": self.config.disable_above,
            "enable_threshold": self.config.enable_at,
            "reason": self.reason,
            **self.telemetry.summary(running),
            "estimates": self.estimates(),
        }
