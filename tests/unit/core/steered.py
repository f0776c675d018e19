"""Two servers of known curves in front of the steering core, in steps of virtual time.

Each of n sequences gets 1 / T(n) tokens a second, half of that while shared GPUs are contended.
Every answer has the same length, so that a test needs no randomness.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.calibration import Calibration
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Lease, Ledger
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.tuning import Tuning
from router.core.types import Layout, Objective, Outcome, RequestShape, Role, ServerSpec

SERVERS = (ServerSpec("spec", Role.SPEC, ""), ServerSpec("base", Role.BASE, ""))
STEP_S = 0.05
_STEPS_A_LOOK = 5

Curve = Callable[[int], float]


def line(base_ms: float, slope_ms: float) -> Curve:
    return lambda n: (base_ms + slope_ms * n) / 1e3


@dataclass
class Steered:
    """A closed loop of `answer_tokens` a request."""

    curves: dict[str, Curve]
    declared: Layout = Layout.DISJOINT
    shared: bool = False
    calibration: Calibration | None = None
    tuning: Tuning = field(default_factory=Tuning)
    objective: Objective = Objective.SUMMED
    answer_tokens: float = 100.0

    def __post_init__(self) -> None:
        self.learner = Learner(
            SERVERS, layout=self.declared, calibration=self.calibration, tuning=self.tuning
        )
        self.policy = make_policy("marginal", learner=self.learner, objective=self.objective)
        self.ledger = Ledger(SERVERS)
        self.health = {server.name: ServerHealth() for server in SERVERS}
        for health in self.health.values():
            health.probe_ok(0.0)
        self.steering = Steering(
            SERVERS, self.policy, self.ledger, self.health, learner=self.learner
        )
        self.now = 0.0
        self.steps = 0
        self.tokens = dict.fromkeys(self.curves, 0.0)
        self.requests = dict.fromkeys(self.curves, 0)
        self.running: list[list[object]] = []

    def send(self, shape: RequestShape | None = None) -> Lease:
        shape = shape or RequestShape()
        decision = self.steering.decide(shape, self.now)
        assert decision is not None
        lease = self.ledger.acquire(decision.server, shape, self.now)
        lease.first_token(self.now)
        self.requests[decision.server] += 1
        return lease

    def run(self, clients: int, seconds: float) -> float:
        """Keep so many requests in flight; return the tokens a second."""
        before = sum(self.tokens.values())
        for _ in range(round(seconds / STEP_S)):
            while len(self.ledger) > clients:
                self._end(0)
            while len(self.ledger) < clients:
                # The first answers end one after the other, as if they had been at it for a while.
                share = 1 - len(self.running) / (2 * clients)
                tokens = self.answer_tokens * (share if self.steps == 0 else 1.0)
                self.running.append([self.send(), tokens])
            self._step()
        return (sum(self.tokens.values()) - before) / seconds

    def _step(self) -> None:
        self.now += STEP_S
        self.steps += 1
        loads = {load.name: load.sequences for load in self.ledger.loads()}
        contended = self.shared and all(loads.values())
        made = {}
        for name, n in loads.items():
            made[name] = STEP_S / self.curves[name](n) / (2 if contended else 1) if n else 0.0
            self.tokens[name] += n * made[name]
        for entry in self.running:
            lease = entry[0]
            assert isinstance(lease, Lease)
            entry[1] -= made[lease.server]  # type: ignore[operator]
        for place in reversed(range(len(self.running))):
            if self.running[place][1] <= 0:  # type: ignore[operator]
                self._end(place)
        if self.steps % _STEPS_A_LOOK == 0:
            self.steering.observe(self.now, self.tokens)

    def _end(self, place: int) -> None:
        lease, _ = self.running.pop(place)
        assert isinstance(lease, Lease)
        lease.release(Outcome.OK, self.now)
