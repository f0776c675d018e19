"""What the engine models say about a load before it is run: each policy's rate, K, and the rivals.

On disjoint GPUs K is the best for the very load that is run, chosen with hindsight, which is what a
fixed rule can reach at most. On shared GPUs it is where the two curves cross at a steady load.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loadtest.engines import ENGINES
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.scenarios import Scenario, rise_and_fall, routed_policy
from loadtest.virtual.loop import rate_tok_s
from loadtest.virtual.station import Server
from loadtest.workload import Workload
from router.core.policy import make_policy
from router.core.types import Layout, Role

_THRESHOLDS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
_LEVELS = (1, 2, 4, 8, 16, 32, 64)
# Long enough for a steady rate, on a clock of 1.
STEADY_S = 20.0

ROUTED = "routed"
SINGLE_SERVERS = ("spec-only", "base-only")
FIXED_POLICIES = (*SINGLE_SERVERS, "least-inflight")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second by the engine models.

    `runs` are the demo's four; `equal_pairs` are two servers of one kind on two GPUs.
    """

    policy: str
    threshold: int
    runs: Mapping[str, float]
    equal_pairs: Mapping[str, float]


def forecast(scenario: Scenario, layout: Layout, workload: Workload, engine_s: float) -> Forecast:
    """Simulate the load of so many engine seconds under every policy and threshold."""
    load = rise_and_fall(engine_s)
    spec = _server("spec", Role.SPEC, scenario.spec)
    base = _server("base", Role.BASE, scenario.base)

    def rate(policy: str, threshold: int = 0) -> float:
        made = make_policy(policy, threshold=threshold)
        return rate_tok_s((spec, base), made, load, workload, layout)

    policy = routed_policy(layout)
    if layout is Layout.DISJOINT:
        threshold = max(_THRESHOLDS, key=lambda k: rate(policy, k))
    else:
        threshold = _crossing(spec, base, workload, STEADY_S * scenario.clock)
    runs = {name: rate(name) for name in FIXED_POLICIES} | {ROUTED: rate(policy, threshold)}
    pairs = {
        f"two {scenario.base}": _pair(base, load, workload),
        f"two {scenario.spec}": _pair(spec, load, workload),
    }
    return Forecast(policy, threshold, runs, pairs)


def _crossing(spec: Server, base: Server, workload: Workload, steady_s: float) -> int:
    """Return the highest steady level at which the speculating server alone is not the slower."""
    crossing = 0
    for level in _LEVELS:
        load = ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=steady_s)
        spec_tok_s, base_tok_s = (
            rate_tok_s((server,), make_policy("least-inflight"), load, workload)
            for server in (spec, base)
        )
        if spec_tok_s < base_tok_s:
            break
        crossing = level
    return crossing


def _pair(server: Server, load: ClosedLoop, workload: Workload) -> float:
    pair = [replace(server, name=f"{server.name}-{place}") for place in (1, 2)]
    return rate_tok_s(pair, make_policy("least-inflight"), load, workload)


def _server(name: str, role: Role, engine: str) -> Server:
    params = ENGINES[engine]
    return Server(name, role, params, running_requests=params.max_running_requests)
