"""The contract that the simulated engine keeps (tests/contract), examined on the real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.behaviours import BEHAVIOURS, Target
from tests.engine.harness.scenario import PLAIN, TREE
from tests.engine.harness.serving import SERVING, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.anyio]

CAPACITY = 2
QUEUE_LIMIT = 4


@pytest.fixture(scope="module", params=[PLAIN, TREE], ids=["plain", "tree"])
def target(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    engine = request.param.with_options(
        "contract", max_running_requests=CAPACITY, max_queued_requests=QUEUE_LIMIT
    )
    server = start_engine(engine, models, tmp_path_factory.mktemp("contract"))
    try:
        server.wait_until_healthy()
        yield Target(
            url=server.url,
            capacity=CAPACITY,
            long_tokens=800,
            context_tokens=SERVING["context_length"],
            model="tiny",
            prompt="the rain in spain",
            speculative="speculative_algorithm" in engine.options,
            queue_limit=QUEUE_LIMIT,
            patience_s=60,
        )
    finally:
        server.stop()


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_contract(name: str, target: Target) -> None:
    await BEHAVIOURS[name](target)
