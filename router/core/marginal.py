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

from collections.abc import Sequence

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
        self.learner.traffic.arrived(shape.sequences, shape.prompt_tokens)
        if self.learner.layout is Layout.SHARED:
            decision = self._on_shared(shape, candidates, loads, now)
        else:
            decision = self._on_disjoint(shape, candidates, loads, now)
        self._sessions.remember(shape.session, decision.server)
        return decision

    def _on_shared(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        reason = self._role.update(shape, loads, now)
        wanted = [load for load in candidates if load.role is self._role.role]
        if not wanted:
            return Decision(self._cheapest(shape, candidates, now)[0].name, Reason.ONLY_SERVER)
        chosen, at_home = self._cheapest(shape, wanted, now)
        return Decision(chosen.name, Reason.AFFINITY if at_home else reason)

    def _on_disjoint(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].name, Reason.ONLY_SERVER)
        self.exploration.earn()
        if not all(self._known(load.name) for load in candidates):
            least = min(candidates, key=lambda load: (load.sequences, load.prefill_tokens))
            return Decision(least.name, Reason.UNMEASURED)
        kept = self.contrast.kept(loads, now)
        if kept is not None and any(load.name == kept for load in candidates):
            return Decision(kept, Reason.EXPLORE)
        best, at_home = self._cheapest(shape, candidates, now)
        probed = self._probe(shape, candidates, best, now)
        if probed is not None:
            return Decision(probed.name, Reason.EXPLORE)
        return Decision(best.name, Reason.AFFINITY if at_home else Reason.MARGINAL)

    def _known(self, name: str) -> bool:
        server = self.learner.servers.get(name)
        return server is not None and server.known

    def _probe(
        self, shape: RequestShape, candidates: Sequence[ServerLoad], best: ServerLoad, now: float
    ) -> ServerLoad | None:
        """Return an idle server that is due for a look, if that costs little enough."""
        for load in candidates:
            if load.sequences or load is best:
                continue
            server = self.learner.servers[load.name]
            promising = server.curve(1).seems_faster
            if not self.exploration.due(server.last_seen_at, now, promising=promising):
                continue
            # Probes are paid for in time per token, whatever the objective.
            here = self._seconds(self.learner.servers[best.name], best, shape, now)
            loss = self._seconds(server, load, shape, now) / here - 1
            if self.exploration.spend(loss * max(shape.sequences, 1), now):
                return load
        return None

    def _cheapest(
        self, shape: RequestShape, candidates: Sequence[ServerLoad], now: float
    ) -> tuple[ServerLoad, bool]:
        """Return the cheapest candidate, or the session's own one if that costs little more; and
        whether it is so.
        """
        home = self._sessions.server(shape.session)
        best = at_home = None
        best_cost = (float("inf"), 0, 0)
        home_cost = float("inf")
        for load in candidates:
            server = self.learner.servers.get(load.name)
            known = server is not None and server.known
            seconds = self._cost(server, load, shape, now) if server and known else 0.0
            cost = (seconds, load.sequences, load.prefill_tokens)
            if load.name == home and known:
                at_home, home_cost = load, seconds
            if best is None or cost < best_cost:
                best, best_cost = load, cost
        assert best is not None, "a policy is given at least one candidate"
        bonus = self.learner.tuning.affinity_share * abs(best_cost[0])
        if at_home is not None and at_home is not best and home_cost <= best_cost[0] + bonus:
            return at_home, True
        return best, False

    def _cost(
        self, server: ServerModel, load: ServerLoad, shape: RequestShape, now: float
    ) -> float:
        """Return what each sequence of the request costs on a server, by the objective."""
        if self.objective is not Objective.RATE:
            return self._seconds(server, load, shape, now)
        added = max(shape.sequences, 1)
        before = load.sequences + server.bypassing(now)
        curve = server.curve(before + added)
        seconds = curve.optimistic(before + added)
        slope = curve.slope(before + added)
        rate_before = before / (seconds - slope * added) if before else 0.0
        return rate_before / added - (before + added) / added / seconds

    def _seconds(
        self, server: ServerModel, load: ServerLoad, shape: RequestShape, now: float
    ) -> float:
        added = max(shape.sequences, 1)
        before = load.sequences + server.bypassing(now)
        after = before + added
        curve = server.curve(after)
        seconds = curve.optimistic(after)
        seconds += server.context.seconds(after, load.context_tokens + shape.prompt_tokens)
        slowed = before if self.objective is Objective.SUMMED else 0
        return seconds + slowed * curve.slope(after) + self._prefill(server, load, shape, slowed)

    def _prefill(
        self, server: ServerModel, load: ServerLoad, shape: RequestShape, slowed: int
    ) -> float:
        """Return what prefill costs beyond the mean prompt's, per token of a mean answer.

        Prompts that wait delay this one; its own, where it is longer than others, delays those
        that decode as well.
        """
        traffic = self.learner.traffic
        answer_tokens = traffic.tokens_per_sequence
        if answer_tokens <= 0:
            return 0.0
        longer = shape.prompt_tokens / max(shape.sequences, 1) - traffic.prompt_per_sequence
        tokens = load.prefill_tokens + longer * (1 + slowed)
        return server.ttft.token_s * tokens / answer_tokens
