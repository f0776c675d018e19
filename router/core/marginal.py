"""The learnt policy: a request goes where it slows tokens least, its own and those already there.

With T(n) the time per output token of one of n sequences and b its slope, a server that has n
sequences gets m more at a cost for each of

    summed   T(n + m) + n b                 growth of the time per token, summed over sequences
    rate     -((n + m) / T(n + m) - n / T(n)) / m      token rate gained, less is better
    latency  T(n + m)                       own time per token

On shared GPUs, where two busy servers halve each other, all requests go to one role.
"""

from collections.abc import Sequence

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
        self._role = RoleChoice(learner)

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
        self.learner.traffic.arrived(shape.sequences)
        if self.learner.layout is Layout.SHARED:
            reason = self._role.update(shape, loads, now)
            wanted = [load for load in candidates if load.role is self._role.role]
            if not wanted:
                return Decision(self._cheapest(shape, candidates).name, Reason.ONLY_SERVER)
            return Decision(self._cheapest(shape, wanted).name, reason)
        if len(candidates) == 1:
            return Decision(candidates[0].name, Reason.ONLY_SERVER)
        self.exploration.earn()
        unknown = [load for load in candidates if not self._known(load.name)]
        if unknown:
            least = min(candidates, key=lambda load: (load.sequences, load.prefill_tokens))
            return Decision(least.name, Reason.UNMEASURED)
        best = self._cheapest(shape, candidates)
        probed = self._probe(shape, candidates, best, now)
        if probed is not None:
            return Decision(probed.name, Reason.EXPLORE)
        return Decision(best.name, Reason.MARGINAL)

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
            added = max(shape.sequences, 1)
            seconds = self._cost(self.learner.servers[best.name], best.sequences, added)
            loss = self._cost(server, 0, added) / seconds - 1 if seconds > 0 else 1.0
            if self.exploration.spend(loss * added, now):
                return load
        return None

    def _cheapest(self, shape: RequestShape, candidates: Sequence[ServerLoad]) -> ServerLoad:
        def cost(load: ServerLoad) -> tuple[float, int, int]:
            server = self.learner.servers.get(load.name)
            if server is None or not server.known:
                return (0.0, load.sequences, load.prefill_tokens)
            added = max(shape.sequences, 1)
            return (
                self._cost(server, load.sequences, added),
                load.sequences,
                load.prefill_tokens,
            )

        return min(candidates, key=cost)

    def _cost(self, server: ServerModel, sequences: int, added: int) -> float:
        after = sequences + added
        curve = server.curve(after)
        seconds = curve.optimistic(after)
        if self.objective is Objective.LATENCY:
            return seconds
        slope = curve.slope(after)
        if self.objective is Objective.RATE:
            before = sequences / (seconds - slope * added) if sequences else 0.0
            return -(after / seconds - before) / added
        return seconds + sequences * slope
