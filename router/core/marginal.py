"""The learnt policy: a request goes where it slows tokens least, its own and those already there.

With T(n) the time per output token of one of n sequences and b its slope, a server that has n
sequences takes m more at a cost, for each of them, of

    summed   T(n + m) + n b                            growth of the summed time per token
    rate     -((n + m) / T(n + m) - n / T(n)) / m      token rate gained, less is better
    latency  T(n + m)                                  own time per token

A prompt longer than usual, and prompts that wait to be prefilled, come on top, spread over the
tokens of a mean answer. On shared GPUs, where two busy servers halve each other, all requests go to
one role (shared.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from router.core.affinity import Sessions
from router.core.contrast import Contrast
from router.core.exploration import Exploration
from router.core.learner import Learner, ServerModel
from router.core.shared import RoleChoice
from router.core.types import (
    Decision,
    Layout,
    Objective,
    Reason,
    RequestShape,
    Role,
    ServerLoad,
)

# A busy server is tried at another load if that is taken to cost at most this share more, or if
# no more windows than this stand behind it.
NEAR_TIE = 0.15
WEAK_WEIGHT = 3.0


class MarginalPolicy:
    """Routes on learnt marginal cost."""

    name = "marginal"

    def __init__(self, learner: Learner, objective: Objective = Objective.SUMMED) -> None:
        self.learner = learner
        self.objective = objective
        self.exploration = Exploration(learner.tuning)
        self.contrast = Contrast(learner)
        self._role = RoleChoice(learner)
        self._sessions = Sessions()

    @property
    def mode(self) -> Role | None:
        """The role that all requests go to, None on disjoint GPUs."""
        return self._role.role if self.learner.layout is Layout.SHARED else None

    @property
    def switches(self) -> int:
        """How often the role has changed."""
        return self._role.switches

    def choose(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        """Return the candidate of the least cost, of the role in charge on shared GPUs."""
        traffic = self.learner.traffic
        sequences = max(shape.sequences, 1)
        asked = _Asked(
            sequences,
            shape.prompt_tokens,
            shape.prompt_tokens / sequences - traffic.prompt_per_sequence,
            traffic.tokens_per_sequence,
            self._sessions.server(shape.session),
            now,
        )
        traffic.arrived(shape.sequences, shape.prompt_tokens)
        if self.learner.layout is Layout.SHARED:
            decision = self._on_shared(asked, candidates, loads)
        else:
            decision = self._on_disjoint(asked, candidates, loads)
        self._sessions.remember(shape.session, decision.server)
        return decision

    def _on_shared(
        self, asked: "_Asked", candidates: Sequence[ServerLoad], loads: Sequence[ServerLoad]
    ) -> Decision:
        role, reason = self._role.choose(asked.sequences, loads, asked.now)
        wanted = [load for load in candidates if load.role is role]
        if not wanted:
            return Decision(self._cheapest(asked, candidates)[0].name, Reason.ONLY_SERVER)
        chosen, at_home = self._cheapest(asked, wanted)
        return Decision(chosen.name, Reason.AFFINITY if at_home else reason)

    def _on_disjoint(
        self, asked: "_Asked", candidates: Sequence[ServerLoad], loads: Sequence[ServerLoad]
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].name, Reason.ONLY_SERVER)
        self.exploration.earn()
        known = self.learner.servers
        for load in candidates:
            if load.name not in known or not known[load.name].known:
                least = min(candidates, key=lambda load: (load.sequences, load.prefill_tokens))
                return Decision(least.name, Reason.UNMEASURED)
        kept = self.contrast.kept(loads, asked.now)
        if kept is not None and any(load.name == kept for load in candidates):
            return Decision(kept, Reason.EXPLORE)
        best, at_home = self._cheapest(asked, candidates)
        probed = self._probe(asked, candidates, best)
        if probed is not None:
            return Decision(probed.name, Reason.EXPLORE)
        return Decision(best.name, Reason.AFFINITY if at_home else Reason.MARGINAL)

    def _probe(
        self, asked: "_Asked", candidates: Sequence[ServerLoad], best: ServerLoad
    ) -> ServerLoad | None:
        """Return a server that is due for a look, if that costs little enough: an idle one that
        was not seen for a while, or one that was not seen at the load that it would have.
        """
        if not self.exploration.looks(asked.now):
            return None
        here = None
        for load in candidates:
            if load is best:
                continue
            server = self.learner.servers[load.name]
            after = load.sequences + asked.sequences
            curve = server.curve(after)
            seen_at = curve.seen_at(after) if load.sequences else server.last_seen_at
            promising = curve.seems_faster and not load.sequences
            if not self.exploration.due(seen_at, asked.now, promising=promising):
                continue
            # Probes are paid for in time per token, whatever the objective.
            if here is None:
                here = self._seconds(self.learner.servers[best.name], best, asked)
            loss = self._seconds(server, load, asked) / here - 1
            if load.sequences and loss > NEAR_TIE and curve.weight(after) > WEAK_WEIGHT:
                continue
            if self.exploration.spend(loss * asked.sequences, asked.now):
                return load
        return None

    def _cheapest(
        self, asked: "_Asked", candidates: Sequence[ServerLoad]
    ) -> tuple[ServerLoad, bool]:
        """Return the cheapest candidate, or the session's own one if that costs little more; and
        whether it is so.
        """
        cost_of = self._lost_rate if self.objective is Objective.RATE else self._seconds
        best = at_home = None
        best_cost = home_cost = math.inf
        for load in candidates:
            server = self.learner.servers.get(load.name)
            known = server is not None and server.known
            cost = cost_of(server, load, asked) if server is not None and known else 0.0
            if known and load.name == asked.home:
                at_home, home_cost = load, cost
            if best is None or cost < best_cost or (cost == best_cost and _less(load, best)):
                best, best_cost = load, cost
        assert best is not None, "a policy is given at least one candidate"
        bonus = self.learner.tuning.affinity_share * abs(best_cost)
        if at_home is not None and at_home is not best and home_cost <= best_cost + bonus:
            return at_home, True
        return best, False

    def _seconds(self, server: ServerModel, load: ServerLoad, asked: "_Asked") -> float:
        """Return the cost in time per token: summed, or the request's own."""
        before = load.prefill_sequences + load.decode_sequences + server.bypassing(asked.now)
        after = before + asked.sequences
        seconds, slope = server.curve(after).marginal(after)
        slowed = before if self.objective is Objective.SUMMED else 0
        if server.context.token_s > 0:
            seconds += server.context.seconds(after, load.context_tokens + asked.prompt_tokens)
        if asked.answer_tokens > 0:
            # Prompts that wait delay this one; its own, if it is long, delays those that decode.
            tokens = load.prefill_tokens + asked.longer_tokens * (1 + slowed)
            seconds += self.learner.prefill_token_s * tokens / asked.answer_tokens
        return seconds + slowed * slope

    def _lost_rate(self, server: ServerModel, load: ServerLoad, asked: "_Asked") -> float:
        """Return the cost in tokens a second, negative for a gain."""
        added = asked.sequences
        before = load.sequences + server.bypassing(asked.now)
        seconds, slope = server.curve(before + added).marginal(before + added)
        rate_before = before / (seconds - slope * added) if before else 0.0
        # One more never lowers the rate, whatever two rough curves say.
        return min(0.0, (rate_before - (before + added) / seconds) / added)


class _Asked(NamedTuple):
    """What a decision needs of the request and of the traffic it is part of.

    `longer_tokens` is by how much a prompt of it is longer than the traffic's mean, `home` the
    server of its session.
    """

    sequences: int
    prompt_tokens: int
    longer_tokens: float
    answer_tokens: float
    home: str | None
    now: float


def _less(a: ServerLoad, b: ServerLoad) -> bool:
    return (a.sequences, a.prefill_tokens) < (b.sequences, b.prefill_tokens)
