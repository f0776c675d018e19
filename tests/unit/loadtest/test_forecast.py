import pytest

from loadtest.engine_params import DecodeMode, EngineParams
from loadtest.engines import ENGINES
from loadtest.forecast import ROUTED, forecast
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.scenarios import SCENARIOS
from loadtest.virtual.loop import rate_tok_s
from loadtest.virtual.station import Server
from loadtest.workload import CHAT_MIX, Fixed, Workload
from router.core.policy import make_policy
from router.core.types import Layout, Role

TEN_MS = EngineParams(
    name="ten-ms",
    source="none",
    decode=DecodeMode(((1, 0.010), (64, 0.010))),
    prefill_pass_s=0.0,
    prefill_token_s=0.0,
    kv_tokens=100_000,
)


def rate(servers: int, level: int, layout: Layout = Layout.DISJOINT) -> float:
    load = ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=10.0)
    workload = Workload("m", Fixed(10, 100), seed=1)
    pair = [Server(str(place), Role.BASE, TEN_MS) for place in range(servers)]
    return rate_tok_s(pair, make_policy("least-inflight"), load, workload, layout)


def test_an_engine_of_known_step_time_gives_its_rate() -> None:
    # The first token is the prefill's, which here takes no time: 100 tokens in 99 steps.
    assert rate(1, level=4) == pytest.approx(400 * 100 / 99, rel=0.01)


def test_a_second_server_on_gpus_of_its_own_adds_and_on_the_same_does_not() -> None:
    alone = rate(1, level=8)
    assert rate(2, level=8) == pytest.approx(alone, rel=0.01)  # a step costs the same at any batch
    assert rate(2, level=8, layout=Layout.SHARED) == pytest.approx(alone * 0.53, rel=0.03)


def test_a_load_without_a_duration_is_refused() -> None:
    load = ClosedLoop(Ramp(((0.0, 1.0),)), requests=5)
    workload = Workload("m", Fixed(1, 1), seed=1)
    with pytest.raises(ValueError, match="duration"):
        rate_tok_s([Server("one", Role.BASE, TEN_MS)], make_policy("base-only"), load, workload)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_forecast_names_a_policy_that_can_be_run_and_its_rivals(
    name: str, layout: Layout
) -> None:
    scenario = SCENARIOS[name]
    ahead = forecast(scenario, layout, Workload("m", CHAT_MIX, seed=1), 4.0 * scenario.clock)
    make_policy(ahead.policy, threshold=ahead.threshold)
    assert set(ahead.runs) == {"spec-only", "base-only", "least-inflight", ROUTED}
    assert len(ahead.equal_pairs) == 2
    assert min(*ahead.runs.values(), *ahead.equal_pairs.values()) > 0
    assert {scenario.spec, scenario.base} <= set(ENGINES)


def test_on_disjoint_gpus_routed_beats_both_servers_and_on_shared_ones_not_the_better() -> None:
    workload = Workload("m", CHAT_MIX, seed=1)
    apart = forecast(SCENARIOS["h200-tree"], Layout.DISJOINT, workload, 16.0).runs
    assert apart[ROUTED] > max(apart["spec-only"], apart["base-only"])
    shared = forecast(SCENARIOS["h200-tree"], Layout.SHARED, workload, 16.0).runs
    assert shared["least-inflight"] < shared[ROUTED] < shared["base-only"]
