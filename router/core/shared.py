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

import math
from collections.abc import Sequence

from router.core.learner import Learner, ServerModel
from router.core.types import Reason, Role, ServerLoad

_LOOK_S = 1.0
_SEQUENCES_MAX = 512
_CAPACITY_AT = 256
_DRAIN_LIFETIMES = 1.2
# Saturated: near its capacity, with very many in flight.
_SATURATED = 0.95
_SATURATED_SEQUENCES = 128
_TRIAL_S_MAX = 60.0
_TRIAL_AFTER_S = 3.0
_SEEN_WEIGHT = 1.0
_LOST_TRIAL = 1.2
# A trial ends with so many windows of the new role alone if they are clear, else with the most; it
# is lost by more than so much.
_TRIAL_WEIGHT = 4.0
_TRIAL_WEIGHT_MAX = 15.0
_TRIAL_GAIN = 0.01
_BESIDE_WEIGHT = 0.25


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
        self._tried: set[tuple[Role, int]] = set()
        self._trial_until: float | None = None
        self._started = False

    def update(self, sequences: int, loads: Sequence[ServerLoad], now: float) -> Reason:
        """Take a reading of the loads; return why the role is what it is."""
        in_flight = sum(load.sequences for load in loads)
        before = self.role
        here, there = self._model(self.role), self._model(_other(self.role))
        after = in_flight + sequences
        if here is not None and there is not None:
            self._react(here, there, after, now, nothing_in_flight=in_flight == 0)
            if self.role is before and self._due(now):
                self._look(here, there, loads, now)
        return Reason.STAY if self.role is before else Reason.SWITCH

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

    def _react(
        self,
        here: ServerModel,
        there: ServerModel,
        sequences: int,
        now: float,
        *,
        nothing_in_flight: bool,
    ) -> None:
        """Choose freely at the first request, readily while traffic is new; later flee bursts."""
        if not (here.known and there.known):
            return
        ratio = _ratio(here, there, sequences)
        if not self._started:
            self._started = True
            if ratio > 1 and nothing_in_flight:
                self.role = there.role
                return
        tuning = self._learner.tuning
        new = self.traffic.observed_s < _TRIAL_AFTER_S and self.switches == 0
        limit = 1 + tuning.switch_gain if new else tuning.overload_ratio
        if self.role is Role.SPEC and ratio >= limit and self._trial_until is None:
            self._switch(now)

    def _look(
        self, here: ServerModel, there: ServerModel, loads: Sequence[ServerLoad], now: float
    ) -> None:
        elapsed_s = now - (self._looked_at or now)
        self._looked_at = now
        draining = any(load.sequences and load.role is not self.role for load in loads)
        sequences = max(1.0, self.traffic.sequences)
        if self._trial_until is not None:
            if now < self._trial_until and not self._decided(here, there, loads, sequences):
                return
            self._trial_until = None
            # The other role's windows all come from before; this one's, if any, are few.
            if not here.known or (there.known and self._gain(here, there) > _TRIAL_GAIN):
                self._switch(now)
            return
        if draining:
            return
        there.unseen(elapsed_s)
        if self._try(here, there, sequences, now):
            return
        if not (here.known and there.known):
            return
        tuning = self._learner.tuning
        gain = self._gain(here, there)
        self._lost_s = max(0.0, self._lost_s + min(gain, 1.0) * elapsed_s)
        dwelt = self._since is None or now - self._since >= tuning.switch_dwell_s
        cost_s = tuning.switch_cost * _DRAIN_LIFETIMES * self.traffic.lifetime_s
        if gain >= tuning.switch_gain and dwelt and self._lost_s >= cost_s and self._free():
            self._switch(now)

    def _try(self, here: ServerModel, there: ServerModel, sequences: float, now: float) -> bool:
        """Move to a role that was never seen at about this load, once per octave and role."""
        key = (there.role, round(math.log2(sequences)))
        tuning = self._learner.tuning
        if (
            key in self._tried
            or self._learner.calibrated
            or tuning.explore_share <= 0
            or self.traffic.observed_s < _TRIAL_AFTER_S
            or _weight(here, sequences) < _SEEN_WEIGHT
            or _weight(there, sequences) >= 0.5 * _SEEN_WEIGHT
            or (self._since is not None and now - self._since < tuning.switch_dwell_s)
            or not self._free()
        ):
            return False
        if there.known:
            optimistic = there.curve(sequences).optimistic(sequences)
            if optimistic * (1 + tuning.switch_gain) > _seconds(here, sequences):
                return False
        self._tried.add(key)
        self._switch(now)
        self._trial_until = now + _TRIAL_S_MAX
        return True

    def _decided(
        self, here: ServerModel, there: ServerModel, loads: Sequence[ServerLoad], sequences: float
    ) -> bool:
        """Whether a trial has shown enough. A spec server that is much slower while the load still
        moves to it would be more so under all of it.
        """
        seen = _weight(here, sequences)
        if seen >= _TRIAL_WEIGHT:
            curve = here.curve(sequences)
            doubt = 2 * curve.noise * math.sqrt(1 / seen + 1 / max(_weight(there, sequences), 1.0))
            ratio = _seconds(there, sequences) / _seconds(here, sequences)
            return seen >= _TRIAL_WEIGHT_MAX or abs(ratio - 1) > doubt
        moved = sum(load.sequences for load in loads if load.role is self.role)
        beside = here.beside
        if self.role is not Role.SPEC or moved == 0 or beside.weight(moved) < _BESIDE_WEIGHT:
            return False
        seconds = beside.seconds(moved) / self._learner.interference().slowdown
        # Loads far below were perhaps never seen on the other role: time does not fall with load.
        return seconds > _LOST_TRIAL * _seconds(there, max(moved, sequences / 2))

    def _gain(self, here: ServerModel, there: ServerModel) -> float:
        """Return the share of the time in flight that the other role would save."""
        traffic = self.traffic
        if traffic.closed or not self._learner.tuning.compare_at_equal_rate:
            # A load of now that was another one a moment ago may soon be that again.
            loads = (max(1.0, traffic.level), max(1.0, traffic.sequences))
            return min(1 - 1 / _ratio(here, there, load) for load in loads)
        rate = traffic.tokens_per_s
        return 1 - mean_load(there, rate) / mean_load(here, rate)

    def _free(self) -> bool:
        """Whether a change can be afforded: not while draining would start an overload."""
        if self.traffic.closed:
            return True
        capacities = {
            role: _CAPACITY_AT / _seconds(model, _CAPACITY_AT)
            for role in Role
            if (model := self._model(role)) is not None and model.known
        }
        most = max(capacities.values(), default=0.0)
        rate = self.traffic.tokens_per_s
        full = rate > _SATURATED * capacities.get(self.role, math.inf)
        if full and self.traffic.sequences > _SATURATED_SEQUENCES:
            return True
        return rate <= self._learner.tuning.switch_load_max * most


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


def _ratio(server: ServerModel, other: ServerModel, sequences: float) -> float:
    """Return how many times as slow as the other a server is, by what was borne out if that is
    known of both: the latest windows may hold a burst of prompts, or bad luck.
    """
    here, there = server.curve(sequences), other.curve(sequences)
    if here.settled().known and there.settled().known:
        here, there = here.settled(), there.settled()
    return here.seconds(sequences) / there.seconds(sequences)


def _weight(server: ServerModel, sequences: float) -> float:
    return server.curve(sequences).weight(sequences)
