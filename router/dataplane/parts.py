"""What the own endpoints show and change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.override import PolicyInForce
from router.core.steering import Steering
from router.dataplane.engine_loads import LoadPoller
from router.dataplane.gate import Gate
from router.dataplane.learning import Learning
from router.dataplane.lifecycle import Lifecycle
from router.dataplane.metrics import Metrics
from router.dataplane.probe import Prober
from router.dataplane.reload import InForce


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one router that its own endpoints look at."""

    in_force: InForce
    lifecycle: Lifecycle
    ledger: Ledger
    health: Mapping[str, ServerHealth]
    policy: PolicyInForce
    steering: Steering
    gate: Gate
    learner: Learner
    learning: Learning
    prober: Prober
    poller: LoadPoller
    metrics: Metrics
    clock: Callable[[], float]
    version: str
