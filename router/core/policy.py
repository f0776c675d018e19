"""Which server a request goes to: a policy wants a role, the role's least loaded server gets it.

What is counted is sequences (n times prompts), in both phases, on all servers, up or not, plus the
request's own: the concurrency that the request will see. So K is the highest concurrency that still
belongs on a speculating server, a measured crossover goes in unchanged, and K = 0 never speculates.

    threshold       all to spec up to K, all to base above; two thresholds and a dwell
    split           the first K to spec, the rest to base: the strong fixed rule on disjoint GPUs
    least-inflight  the fewest sequences, whatever the role
    spec-only, base-only
    marginal        learnt: where it slows tokens least (marginal.py)

If no server of the wanted role can take the request, the other role does: a decision, not an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from router.core.hysteresis import Hysteresis, Move
from router.core.learner import Learner
from router.core.marginal import MarginalPolicy
from router.core.types import Decision, Objective, Policy, Reason, RequestShape, Role, ServerLoad

DEFAULT_THRESHOLD = 8
THRESHOLD_MAX = 100_000
DEFAULT_DWELL_S = 1.0
# The lower threshold as a share of the upper one, where only that one is given.
DOWN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class _Reading:
    """The load that a request would see: sequences, its own included; and when."""

    in_flight: int
    on_spec: int
    now: float


class _RolePolicy(ABC):
    """What all policies share: they differ only in the role they want."""

    name: str

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    @property
    def mode(self) -> Role | None:
        """The role that all requests go to now, None if the policy has no such mode."""
        return None

    @property
    def switches(self) -> int:
        """How often the mode has changed."""
        return 0

    def choose(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        """Return the least loaded candidate of the wanted role, of all if that role has none."""
        in_flight = on_spec = shape.sequences
        for load in loads:
            in_flight += load.sequences
            if load.role is Role.SPEC:
                on_spec += load.sequences
        role, reason = self._want(_Reading(in_flight, on_spec, now))
        wanted = [load for load in candidates if role is None or load.role is role]
        if not wanted or (role is None and len(wanted) == 1):
            return Decision(self._least_loaded(candidates), Reason.ONLY_SERVER)
        return Decision(self._least_loaded(wanted), reason)

    @abstractmethod
    def _want(self, reading: _Reading) -> tuple[Role | None, Reason]:
        """Return the wanted role, None for any, and why."""

    def _least_loaded(self, candidates: Sequence[ServerLoad]) -> str:
        """Fewest sequences, then fewest prefill tokens, then the longest wait for a turn."""
        last = self._last_turn
        chosen = min(
            candidates,
            key=lambda load: (load.sequences, load.prefill_tokens, last.get(load.name, 0)),
        ).name
        self._turn += 1
        last[chosen] = self._turn
        return chosen


class FixedPolicy(_RolePolicy):
    """Everything to one role."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.name = f"{role}-only"
        self._role = role

    @property
    def mode(self) -> Role:
        """The role itself."""
        return self._role

    def _want(self, _reading: _Reading) -> tuple[Role | None, Reason]:
        return self._role, Reason.FIXED


class LeastInflightPolicy(_RolePolicy):
    """The server with the fewest sequences in flight."""

    name = "least-inflight"

    def _want(self, _reading: _Reading) -> tuple[Role | None, Reason]:
        return None, Reason.LEAST_INFLIGHT


class SplitPolicy(_RolePolicy):
    """To spec while all spec servers together hold at most `threshold` sequences; then to base."""

    name = "split"

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self._threshold = threshold

    def _want(self, reading: _Reading) -> tuple[Role | None, Reason]:
        fits = reading.on_spec <= self._threshold
        return Role.SPEC if fits else Role.BASE, Reason.SPLIT


class ThresholdPolicy(_RolePolicy):
    """All to spec at low load, all to base at high load."""

    name = "threshold"

    def __init__(self, threshold: int, threshold_down: int | None, dwell_s: float) -> None:
        super().__init__()
        # A request counts itself: a lower threshold of 0 would never be reached again.
        lowest = min(threshold, 1)
        if threshold_down is None:
            threshold_down = max(lowest, int(DOWN_SHARE * threshold))
        if not lowest <= threshold_down <= threshold:
            raise ValueError(
                f"threshold_down must be {lowest} to {threshold} (threshold), not {threshold_down}"
            )
        self._base_mode = Hysteresis(up=threshold, down=threshold_down, dwell=dwell_s)

    @property
    def mode(self) -> Role:
        """The role that the latest reading has led to."""
        return Role.BASE if self._base_mode.high else Role.SPEC

    @property
    def switches(self) -> int:
        """How often the mode has changed."""
        return self._base_mode.switches

    def _want(self, reading: _Reading) -> tuple[Role | None, Reason]:
        move = self._base_mode.update(reading.in_flight, reading.now)
        if move is Move.HELD:
            return self.mode, Reason.DWELL
        if self._base_mode.high:
            return Role.BASE, Reason.ABOVE_THRESHOLD
        return Role.SPEC, Reason.BELOW_THRESHOLD


@dataclass(frozen=True, slots=True)
class _Settings:
    """What policies are made of; each takes what it has a use for."""

    threshold: int
    threshold_down: int | None
    dwell_s: float
    learner: Learner | None
    objective: Objective


_MAKERS: Mapping[str, Callable[[_Settings], Policy]] = MappingProxyType(
    {
        "threshold": lambda s: ThresholdPolicy(s.threshold, s.threshold_down, s.dwell_s),
        "spec-only": lambda _: FixedPolicy(Role.SPEC),
        "base-only": lambda _: FixedPolicy(Role.BASE),
        "least-inflight": lambda _: LeastInflightPolicy(),
        "split": lambda s: SplitPolicy(s.threshold),
        "marginal": lambda s: MarginalPolicy(s.learner or Learner(), s.objective),
    }
)
POLICIES: tuple[str, ...] = tuple(_MAKERS)
WITH_THRESHOLD = ("threshold", "split")
# Policies that steer between the roles need both; those with a role in their name, that one.
_ROLES_NEEDED: Mapping[str, tuple[Role, ...]] = MappingProxyType(
    {
        "threshold": tuple(Role),
        "split": tuple(Role),
        "spec-only": (Role.SPEC,),
        "base-only": (Role.BASE,),
    }
)


def missing_role(name: str, roles: Collection[Role]) -> Role | None:
    """Return a role that the policy called `name` cannot do without and that is not in `roles`."""
    return next((role for role in _ROLES_NEEDED.get(name, ()) if role not in roles), None)


def usable_policies(roles: Collection[Role]) -> list[str]:
    """Return the policies that servers of these roles are enough for."""
    return [name for name in POLICIES if missing_role(name, roles) is None]


def make_policy(
    name: str,
    *,
    threshold: int = DEFAULT_THRESHOLD,
    threshold_down: int | None = None,
    dwell_s: float = DEFAULT_DWELL_S,
    learner: Learner | None = None,
    objective: Objective = Objective.SUMMED,
) -> Policy:
    """Make the policy called `name`. A policy ignores the settings that it has no use for.

    `marginal` decides by what `learner` knows, which also holds the layout; the caller gives the
    same learner to `Steering`, which feeds it. Without one nothing is ever learnt.

    ValueError, with a message for the user, on an unknown name or contradictory settings.
    """
    if name not in _MAKERS:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(POLICIES)}")
    if threshold < 0:
        raise ValueError(f"threshold must not be negative, not {threshold}")
    return _MAKERS[name](_Settings(threshold, threshold_down, dwell_s, learner, objective))
