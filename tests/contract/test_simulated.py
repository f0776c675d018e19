"""The contract, kept by the simulated engine. tests/engine runs it against the real one."""

from collections.abc import AsyncIterator

import pytest

from loadtest.sim_server import SimOptions, SimServer, parse_spec
from tests.contract.behaviours import BEHAVIOURS, Target

CAPACITY = 2
QUEUE_LIMIT = 4


@pytest.fixture(params=["h200-plain", "h200-tree-v1", "h200-tree-v1@1"])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    engine = parse_spec(f"one={request.param}:0")
    params = engine.params
    options = SimOptions(max_running_requests=CAPACITY, max_queued_requests=QUEUE_LIMIT)
    async with SimServer([engine], options) as server:
        yield Target(
            url=server.urls["one"],
            capacity=CAPACITY,
            long_tokens=params.context_tokens - 200,
            context_tokens=params.context_tokens,
            speculative=params.speculative,
            queue_limit=QUEUE_LIMIT,
        )


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_contract(name: str, target: Target) -> None:
    await BEHAVIOURS[name](target)
