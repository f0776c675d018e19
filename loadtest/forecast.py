"""What the engine models say about a load before it is run: each policy's rate, K, and the rivals.

On disjoint GPUs K is the best for the very load that is run, chosen with hindsight, which is what a
fixed rule can reach at most. On shared GPUs it is where the two curves cross at a steady load.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from loadtest.engine_params import EngineParams
from loadtest.engines import ENGINES
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.rivals import simulate
from loadtest.scenarios import Scenario, rise_and_fall, routed_policy
from loadtest.workload import Workload
from router.core.policy import make_policy
from router.core.types import Layout, Role

_THRESHOLDS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
_LEVELS = (1, 2, 4, 8, 16, 32, 64)
# Long enough for a steady rate, on a clock of 1.
STEADY_S = 20.0
_Server = tuple[Role, EngineParams]

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
    spec, base = (Role.SPEC, ENGINES[scenario.spec]), (Role.BASE, ENGINES[scenario.base])

    def rate(policy: str, threshold: int = 0) -> float:
        made = make_policy(policy, threshold=threshold)
        return simulate((spec, base), made, load, workload, layout)

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


def _crossing(spec: _Server, base: _Server, workload: Workload, steady_s: float) -> int:
    """Return the highest steady level at which the speculating server alone is not the slower."""
    crossing = 0
    for level in _LEVELS:
        load = ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=steady_s)
        spec_tok_s, base_tok_s = (
            simulate((server,), make_policy("least-inflight"), load, workload)
            for server in (spec, base)
        )
        if spec_tok_s < base_tok_s:
            break
        crossing = level
    return crossing


def _pair(server: _Server, load: ClosedLoop, workload: Workload) -> float:
    return simulate((server, server), make_policy("least-inflight"), load, workload)
