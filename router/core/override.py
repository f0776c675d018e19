"""The policy in force: the configured one, or another that was put in its place for a while.

An override ends by itself, at a time that is given with it, so that nobody has to remember it. The
configured policy keeps its state meanwhile, and may be exchanged for another without ending it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.core.types import Decision, Policy, Reason, RequestShape, Role, ServerLoad


@dataclass(frozen=True, slots=True)
class Override:
    """A policy for a while: until `until`, monotonic seconds. `threshold` is that of the policy."""

    policy: Policy
    until: float
    threshold: int | None = None


class PolicyInForce:
    """A policy that hands each decision to the one in force.

    Decisions under an override say so as their reason, unless there was no choice.
    """

    def __init__(self, configured: Policy) -> None:
        self.configured = configured
        self._override: Override | None = None
        self._switches_before = 0

    @property
    def name(self) -> str:
        """The word of the policy in force."""
        return self._in_force.name

    @property
    def mode(self) -> Role | None:
        """The role that all requests go to now, None if the policy in force has no such mode."""
        return self._in_force.mode

    @property
    def switches(self) -> int:
        """How often the mode of any policy has changed, those that are gone included."""
        count = self._switches_before + self.configured.switches
        return count if self._override is None else count + self._override.policy.switches

    def choose(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        """Return what the policy in force decides."""
        if self._override is None or self.override(now) is None:
            return self.configured.choose(shape, candidates, loads, now)
        decision = self._override.policy.choose(shape, candidates, loads, now)
        if decision.reason is Reason.ONLY_SERVER:
            return decision
        return replace(decision, reason=Reason.OVERRIDE)

    def override(self, now: float) -> Override | None:
        """Return the override in force, None if there is none; one that is over is dropped."""
        if self._override is not None and now >= self._override.until:
            self.restore()
        return self._override

    def put(self, override: Override) -> None:
        """Put a policy in the configured one's place, or in that of an earlier override."""
        self.restore()
        self._override = override

    def restore(self) -> bool:
        """Go back to the configured policy; return whether there was an override."""
        if self._override is None:
            return False
        self._switches_before += self._override.policy.switches
        self._override = None
        return True

    def configure(self, policy: Policy) -> None:
        """Exchange the configured policy. An override stays."""
        self._switches_before += self.configured.switches
        self.configured = policy

    @property
    def _in_force(self) -> Policy:
        return self.configured if self._override is None else self._override.policy
