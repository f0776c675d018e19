"""From nothing, over real sockets: each load served as it can be, and the crossover found."""

import pytest

from loadtest.children import free_port
from loadtest.engines import ENGINES
from loadtest.load import Load
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.record import Ending
from loadtest.runner import run_load
from loadtest.sim_server import EngineSpec, SimOptions, SimServer
from loadtest.target import Target
from loadtest.virtual.curves import best_single_tok_s, best_split, measure
from loadtest.virtual.station import Server
from loadtest.workload import Drawn, Uniform, Workload
from router.core.types import Role
from tests.integration.processes import client_of, ready, router

pytestmark = pytest.mark.anyio

MODELS = {Role.SPEC: ENGINES["h200-tree-v1"], Role.BASE: ENGINES["h200-plain"]}
# Lengths that vary: answers of one length would begin and end together on the plain server, and
# share their prefill passes, as they never do where two servers are routed to.
VARIED = Drawn(Uniform(32, 96), Uniform(32, 160))
# Sequences in flight, and for how many seconds of the engines' time.
HELD = ((2, 2.0), (8, 4.5), (12, 6.5), (24, 2.5))
# The engines' seconds per second: slowed, their steps dwarf what the machine adds to them.
CLOCK = 0.6
NOISE = 0.2


async def held_tok_s(url: str, level: int, seconds: float) -> float:
    """Hold a load; return its tokens per second of the engines' time."""
    load = Load(
        (Target.parse(url, "/v1/chat/completions"),),
        Workload("crossover-sim", VARIED, seed=level),
        ClosedLoop(Ramp(((0.0, float(level)),)), duration_s=seconds / CLOCK),
    )
    rows = (await run_load(load)).rows
    assert {row.ending for row in rows} == {Ending.OK}
    spent_s = sum(row.end_s - row.intended_s for row in rows if row.end_s is not None)
    return level * sum(row.tokens or 0 for row in rows) / spent_s / CLOCK


@pytest.mark.slow
async def test_it_serves_four_loads_as_it_can_and_finds_the_crossover() -> None:
    spec, base = (
        measure(Server(role, role, model), VARIED, HELD[-1][0]) for role, model in MODELS.items()
    )
    crossover = next(n for n in range(1, 24) if base.table_s[n] < spec.table_s[n])
    specs = [EngineSpec(role, model, free_port()) for role, model in MODELS.items()]
    async with (
        SimServer(specs, SimOptions(clock=CLOCK)) as server,
        router("--spec-url", server.urls["spec"], "--base-url", server.urls["base"]) as made,
        client_of(made) as client,
    ):
        await ready(client, "spec", "base")
        for level, seconds in HELD:
            reached = await held_tok_s(made.url, level, seconds)
            assert reached >= (1 - NOISE) * best_single_tok_s((spec, base), level)
            assert reached <= (1 + NOISE) * best_split(spec, base, level)[1]
        learnt = (await client.get("/crossover/model")).json()["crossover"]
    assert abs(learnt / crossover - 1) <= 0.2
