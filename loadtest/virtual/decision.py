"""What one decision costs: real CPU time on this machine, not simulated."""

import random
import time
from statistics import median

from loadtest.engines import ENGINES
from loadtest.virtual.bench import calibration_of
from loadtest.virtual.curves import Curve
from loadtest.virtual.demands import Demand, Reached
from loadtest.virtual.station import Server, server_specs
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.types import Layout, RequestShape, Role

SERVERS = 8
IN_FLIGHT = 1000
_BATCHES = 200
_DECISIONS = 25

DECISION = Demand(
    "decision",
    f"CPU us of a decision, median, {SERVERS} servers and {IN_FLIGHT} in flight",
    (),
    lambda _: None,
    20.0,
    at_least=False,
)


def measure_decision() -> Reached:
    """Return the median CPU microseconds of `Steering.decide` with a full ledger."""
    spec = [Server(f"spec-{n}", Role.SPEC, ENGINES["h200-tree-v1"]) for n in range(SERVERS // 2)]
    base = [Server(f"base-{n}", Role.BASE, ENGINES["h200-plain"]) for n in range(SERVERS // 2)]
    servers = [*spec, *base]
    specs = server_specs(servers)
    # Rates that order the roles; what they are does not change what a decision costs.
    curve = Curve((1, 8, 64, 256), (200.0, 1500.0, 8000.0, 13900.0))
    known = [(server, curve) for server in (spec[0], base[0])]
    learner = Learner(specs, calibration=calibration_of(known, Layout.DISJOINT))
    ledger = Ledger(specs)
    health = {server.name: ServerHealth() for server in specs}
    for one in health.values():
        one.probe_ok(0.0)
    steering = Steering(
        specs, make_policy("marginal", learner=learner), ledger, health, learner=learner
    )
    rng = random.Random(1)  # noqa: S311 - a measurement
    shapes = [
        RequestShape(prompt_tokens=rng.randint(50, 2000), session=rng.getrandbits(60))
        for _ in range(IN_FLIGHT)
    ]
    for place, shape in enumerate(shapes):
        decision = steering.decide(shape, place * 1e-3)
        assert decision is not None
        lease = ledger.acquire(decision.server, shape, place * 1e-3)
        if place % 10:
            lease.first_token(place * 1e-3)
    costs_us = []
    for batch in range(_BATCHES):
        start_ns = time.thread_time_ns()
        for place in range(_DECISIONS):
            steering.decide(shapes[place], 2.0 + batch * 1e-3)
        costs_us.append((time.thread_time_ns() - start_ns) / 1e3 / _DECISIONS)
    return Reached(DECISION, median(costs_us), "this machine", 1, len(costs_us))
