"""The policy that settings ask for."""

from router.core.learner import Learner
from router.core.policy import make_policy
from router.core.types import Policy
from router.settings import Settings


def policy_of(settings: Settings, learner: Learner) -> Policy:
    """Make the policy of settings, with no state yet."""
    return make_policy(
        settings.policy,
        threshold=settings.threshold,
        threshold_down=settings.threshold_down,
        dwell_s=settings.dwell_s,
        learner=learner,
        objective=settings.objective,
    )


def same_policy(settings: Settings, others: Settings) -> bool:
    """Whether both ask for the same policy, so that it may keep its state."""
    return _asked(settings) == _asked(others)


def _asked(settings: Settings) -> tuple[object, ...]:
    return (
        settings.policy,
        settings.threshold,
        settings.threshold_down,
        settings.dwell_s,
        settings.objective,
    )
