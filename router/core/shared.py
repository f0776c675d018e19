"""Which role serves on shared GPUs: stay with the right one, and rarely move."""

from collections.abc import Sequence

from router.core.learner import Learner
from router.core.types import Reason, RequestShape, Role, ServerLoad


class RoleChoice:
    """The role in charge. The calibration chooses the first one, base without any."""

    def __init__(self, learner: Learner) -> None:
        self.role = Role.BASE
        self.switches = 0
        self._learner = learner

    def update(self, _shape: RequestShape, _loads: Sequence[ServerLoad], _now: float) -> Reason:
        """Take a reading of the loads; return why the role is what it is."""
        return Reason.STAY
