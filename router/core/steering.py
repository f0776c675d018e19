"""From a request's shape to the server that takes it: who can, then who should.

A server can take a request if it is up, is not excluded (it has just failed this very request), and
its context holds prompt and answer. Two exceptions do the least harm: if no server is up, those
that merely answer no probes are tried; if the request fits nowhere, it is sent as if it fitted,
because the engine's own error is the honest answer. Three more leave servers out: one that is
drained gets nothing new; one whose breaker is against it, or that is still cold, gets nothing as
long as another can take the request; and one that has no room (`limits`) is no candidate, so that
there may be none. The policy then chooses among the candidates.

Four times a second or so the caller brings each server's output tokens (`observe`), which with the
ledger's integrals make the windows that the learner learns from.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from router.core.admission import Limits  # noqa: TC001
from router.core.health import HealthState, ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.types import (
    Decision,
    EngineReport,
    Policy,
    Reason,
    RequestShape,
    ServerLoad,
    ServerSpec,
)
from router.core.windows import WindowCutter

RECENT_MAX = 256


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision, when it was made (monotonic seconds), and the loads that it was made on."""

    at: float
    decision: Decision
    loads: tuple[ServerLoad, ...]


class Steering:
    """The facade of the core: one synchronous call per attempt.

    What may be set at any time: `limits`, None for none; `slow_start_s`, 0 for none; `drained`, the
    names of the servers that get nothing new.
    """

    def __init__(
        self,
        servers: Sequence[ServerSpec],
        policy: Policy,
        ledger: Ledger,
        health: Mapping[str, ServerHealth],
        recent_max: int = RECENT_MAX,
        learner: Learner | None = None,
    ) -> None:
        missing = [server.name for server in servers if server.name not in health]
        if missing:
            raise ValueError(f"no health for: {', '.join(missing)}")
        self.policy = policy
        self.recent: deque[DecisionRecord] = deque(maxlen=recent_max)
        self.learner = learner
        self.limits: Limits | None = None
        self.slow_start_s = 0.0
        self.drained: set[str] = set()
        self._ledger = ledger
        self._health = health
        self._observed: tuple[float, float, float] | None = None
        self._cutters = {server.name: WindowCutter() for server in servers}

    def decide(
        self,
        shape: RequestShape,
        now: float,
        exclude: Collection[str] = frozenset(),
        why: Reason | None = None,
    ) -> Decision | None:
        """Choose a server that is not in `exclude`; None if there is none, or none has room.

        `why` is the reason if it is not the policy's own: what has led to `exclude`.
        """
        loads = self._ledger.loads()
        able = self._able(loads, exclude)
        if not able:
            return None
        fitting = [load for load in able if self._fits(load.name, shape)] or able
        candidates: Sequence[ServerLoad] = fitting
        all_well = True
        for load in fitting:
            health = self._health[load.name]
            if not health.breaker.admits or health.returned_at is not None:
                all_well = False
        if not all_well:
            candidates = self._sound(fitting)
        if self.limits is not None:
            candidates = self.limits.with_room(shape, candidates, loads)
            if not candidates:
                return None
        if not all_well and self.slow_start_s and len(candidates) > 1:
            candidates = self._warm(shape, candidates, now) or candidates
        decision = self.policy.choose(shape, candidates, loads, now)
        if decision.reason is Reason.ONLY_SERVER and len(fitting) < len(able):
            decision = replace(decision, reason=Reason.CONTEXT_LENGTH)
        if why is not None:
            decision = replace(decision, reason=why)
        self.recent.append(DecisionRecord(now, decision, loads))
        return decision

    def serves(self, exclude: Collection[str] = frozenset()) -> bool:
        """Whether there is any server for a request that may not go to `exclude`, room or not."""
        return bool(self._able(self._ledger.loads(), exclude))

    def held_back(self, exclude: Collection[str] = frozenset()) -> list[str]:
        """Return the servers that could take a request if they were not drained."""
        return [
            name
            for name in self._cutters
            if name in self.drained and name not in exclude and self._health[name].up
        ]

    def observe(self, now: float, output_tokens: Mapping[str, float]) -> None:
        """Learn from what has happened since the last call. Called about every 0.25 s.

        `output_tokens` are each server's cumulative output tokens, those of streams under way
        included; a server that is missing is not looked at.
        """
        if self.learner is None:
            return
        tokens = sum(output_tokens.values())
        sequence_s = 0.0
        for name, cutter in self._cutters.items():
            totals = self._ledger.totals(name, now)
            sequence_s += totals.sequence_s
            if name not in output_tokens:
                continue
            sequences = self._ledger.load(name).sequences
            window = cutter.cut(now, totals, output_tokens[name], sequences)
            if window is not None:
                self.learner.observe(name, window, self._ledger.take_ttft_samples(name))
        if self._observed is not None:
            at, tokens_before, sequence_s_before = self._observed
            new_tokens = max(0.0, tokens - tokens_before)
            self.learner.passed(now - at, new_tokens, sequence_s - sequence_s_before)
        self._observed = (now, tokens, sequence_s)

    def engine_reported(self, name: str, now: float, report: EngineReport) -> None:
        """Take what an engine says of itself: its own counts, and its switch if it has one."""
        if self.learner is not None:
            own = self._ledger.load(name).sequences
            self.learner.engine_reported(name, now, report, own)

    def _able(self, loads: Sequence[ServerLoad], exclude: Collection[str]) -> list[ServerLoad]:
        for state in (HealthState.UP, HealthState.UNRESPONSIVE):
            able = [
                load
                for load in loads
                if load.name not in exclude
                and self._health[load.name].state is state
                and load.name not in self.drained
            ]
            if able:
                return able
        return []

    def _sound(self, fitting: Sequence[ServerLoad]) -> Sequence[ServerLoad]:
        return [load for load in fitting if self._health[load.name].breaker.admits] or fitting

    def _warm(
        self, shape: RequestShape, candidates: Sequence[ServerLoad], now: float
    ) -> Sequence[ServerLoad]:
        return [
            load
            for load in candidates
            if (health := self._health[load.name]).returned_at is None
            or not health.is_cold(load.sequences + shape.sequences, now, self.slow_start_s)
        ]

    def _fits(self, name: str, shape: RequestShape) -> bool:
        context_length = self._health[name].context_length
        if context_length is None:
            return True
        prompt_tokens = (
            shape.prompt_tokens
            if shape.longest_prompt_tokens is None
            else shape.longest_prompt_tokens
        )
        return prompt_tokens + (shape.max_tokens or 0) <= context_length
