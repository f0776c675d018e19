"""Which role serves on shared GPUs: stay with the right one, and rarely move.

While both roles have work each gets about half, so a change costs about 1.2 mean lifetimes of a
request at full rate. A change is made when what staying has lost comes to a share of that.

What staying loses depends on the traffic. Clients that each wait for their answer keep the load
where it is: then tokens a second at this load are compared. Independent arrivals keep the token
rate where it is, and a slow server has more in flight only because it is slow: then the mean loads
are compared that either role would have at this rate. For a birth-death process with arrivals at
rate r, in tokens, and service R(n) = n / T(n), the mean is that of p(n) ~ prod r / R(k), k = 1..n.
How much the load varies tells the two kinds of traffic apart.

Independent arrivals forbid changes under high load: draining at half the capacity would start an
overload. And a burst is met at once: no waiting where base is half as fast again as spec.
"""

from collections.abc import Sequence

from router.core.learner import Learner, ServerModel
from router.core.trial import Trial
from router.core.types import Reason, Role, ServerLoad

_LOOK_S = 1.0
_SEQUENCES_MAX = 512
_CAPACITY_AT = 256
_DRAIN_LIFETIMES = 1.2
# Saturated: near its capacity, with very many in flight.
_SATURATED = 0.95
_SATURATED_SEQUENCES = 128
# So long after the first request the choice is not yet a change.
_NEW_S = 3.0


class RoleChoice:
    """The role in charge: the better one of the calibration, base where nothing is known."""

    def __init__(self, learner: Learner) -> None:
        self.role = Role.BASE
        self.switches = 0
        self.traffic = learner.traffic
        self._learner = learner
        self._since: float | None = None
        self._looked_at: float | None = None
        self._lost_s = 0.0
        self._trial = Trial(learner)
        self._started = False

    def choose(
        self, sequences: int, loads: Sequence[ServerLoad], now: float
    ) -> tuple[Role, Reason]:
        """Return the role that a request of so many sequences goes to, and why."""
        in_flight = sum(load.sequences for load in loads)
        before = self.role
        here, there = self._model(self.role), self._model(_other(self.role))
        if here is not None and there is not None:
            self._react(here, there, in_flight + sequences, now)
            if self.role is before and self._due(now):
                self._look(here, there, loads, now)
            if self._trial.on and self._trial.takes(there, loads, sequences):
                return there.role, Reason.EXPLORE
        return self.role, Reason.STAY if self.role is before else Reason.SWITCH

    def _model(self, role: Role) -> ServerModel | None:
        servers = self._learner.servers.values()
        return next((server for server in servers if server.role is role), None)

    def _due(self, now: float) -> bool:
        if self._looked_at is None:
            self._looked_at = now
        return now - self._looked_at >= _LOOK_S

    def _switch(self, now: float) -> None:
        self.role = _other(self.role)
        self.switches += 1
        self._since = now
        self._lost_s = 0.0

    def _react(self, here: ServerModel, there: ServerModel, sequences: int, now: float) -> None:
        """Choose freely at the first request, readily while traffic is new; later flee bursts."""
        first, self._started = not self._started, True
        if not (here.known and there.known):
            return
        ratio = _ratio(here, there, sequences)
        if first and ratio > 1:
            self.role = there.role
            return
        tuning = self._learner.tuning
        new = self.traffic.observed_s < _NEW_S and self.switches == 0
        limit = 1 + tuning.switch_gain if new else tuning.overload_ratio
        if self.role is Role.SPEC and ratio >= limit and self._dwelt(now) and not self._trial.on:
            self._switch(now)

    def _dwelt(self, now: float) -> bool:
        dwell_s = self._learner.tuning.switch_dwell_s
        return self._since is None or now - self._since >= dwell_s

    def _look(
        self, here: ServerModel, there: ServerModel, loads: Sequence[ServerLoad], now: float
    ) -> None:
        elapsed_s = now - (self._looked_at or now)
        self._looked_at = now
        if self._trial.on:
            if self._trial.verdict(here, there, loads, now):
                self._switch(now)
            return
        if any(load.sequences and load.role is not self.role for load in loads):
            return
        there.unseen(elapsed_s)
        if self._dwelt(now) and self._free():
            sequences = max(1.0, self.traffic.sequences)
            if self._trial.begin(here, there, sequences, now):
                return
        if not (here.known and there.known):
            return
        tuning = self._learner.tuning
        gain = self._gain(here, there)
        self._lost_s = max(0.0, self._lost_s + min(gain, 1.0) * elapsed_s)
        cost_s = tuning.switch_cost * _DRAIN_LIFETIMES * self.traffic.lifetime_s
        pays = gain >= tuning.switch_gain and self._lost_s >= cost_s
        if pays and self._dwelt(now) and self._free():
            self._switch(now)

    def _gain(self, here: ServerModel, there: ServerModel) -> float:
        """Return the share of the time in flight that the other role would save."""
        traffic = self.traffic
        at_load = traffic.closed or not self._learner.tuning.compare_at_equal_rate
        if at_load or self._saturated(here):
            # A load of now that was another one a moment ago may soon be that again.
            loads = (max(1.0, traffic.level), max(1.0, traffic.sequences))
            return min(1 - 1 / _ratio(here, there, load) for load in loads)
        rate = traffic.tokens_per_s
        return 1 - mean_load(there, rate) / mean_load(here, rate)

    def _free(self) -> bool:
        """Whether a change can be afforded: not while draining would start an overload."""
        if self.traffic.closed:
            return True
        models = [model for role in Role if (model := self._model(role)) is not None]
        capacities = [_rate(model, _CAPACITY_AT) for model in models if model.known]
        limit = self._learner.tuning.switch_load_max * max(capacities, default=0.0)
        here = self._model(self.role)
        saturated = here is not None and here.known and self._saturated(here)
        return saturated or self.traffic.tokens_per_s <= limit

    def _saturated(self, server: ServerModel) -> bool:
        """Whether a server has more in flight than it has any use for, and for a while."""
        sequences = min(self.traffic.level, self.traffic.sequences)
        if sequences <= _SATURATED_SEQUENCES:
            return False
        return _rate(server, sequences) >= _SATURATED * _rate(server, _CAPACITY_AT)


def mean_load(server: ServerModel, tokens_per_s: float) -> float:
    """Return the mean sequences in flight of independent arrivals that ask for so many tokens a
    second, at most _SEQUENCES_MAX.
    """
    share, total, weighted = 1.0, 1.0, 0.0
    for n in range(1, _SEQUENCES_MAX):
        share *= tokens_per_s * _seconds(server, n) / n
        total += share
        weighted += n * share
        if share < 1e-9 * total:
            break
        if total > 1e200:
            return float(_SEQUENCES_MAX)
    return max(weighted / total, 1e-9)


def _other(role: Role) -> Role:
    return Role.BASE if role is Role.SPEC else Role.SPEC


def _seconds(server: ServerModel, sequences: float) -> float:
    return server.curve(sequences).seconds(sequences)


def _rate(server: ServerModel, sequences: float) -> float:
    return sequences / _seconds(server, sequences)


def _ratio(server: ServerModel, other: ServerModel, sequences: float) -> float:
    """Return how many times as slow as the other a server is, by what was borne out if that is
    known of both: the latest windows may hold a burst of prompts, or bad luck.
    """
    here, there = server.curve(sequences), other.curve(sequences)
    if here.settled().known and there.settled().known:
        here, there = here.settled(), there.settled()
    return here.seconds(sequences) / there.seconds(sequences)
