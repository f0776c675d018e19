"""Runs in one process and in several, against simulated engines on real sockets."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.crew import merged
from loadtest.engines import ENGINES
from loadtest.load import Load, WarmUp
from loadtest.pacing import ClosedLoop, OpenLoop, Ramp
from loadtest.record import Ending, Progress, RequestRow, RunResult
from loadtest.runner import run_load
from loadtest.sim_server import MODEL_NAME, EngineSpec, SimOptions, SimServer
from loadtest.stats import summarise
from loadtest.target import Target
from loadtest.workload import Api, Fixed, Workload

pytestmark = pytest.mark.anyio


@pytest.fixture(name="server")
async def _server() -> AsyncIterator[SimServer]:
    engines = [EngineSpec("a", ENGINES["h200-plain"]), EngineSpec("b", ENGINES["h200-tree-v1"])]
    async with SimServer(engines, SimOptions(clock=50.0)) as server:
        yield server


def load_on(*urls: str, requests: int = 20, api: Api = Api.CHAT) -> Load:
    return Load(
        tuple(Target.parse(url, api) for url in urls),
        Workload(MODEL_NAME, Fixed(16, 10), seed=1, api=api),
        ClosedLoop(Ramp(((0.0, 4.0),)), requests=requests),
    )


async def test_a_warm_up_is_kept_apart_and_lies_before_the_run(server: SimServer) -> None:
    load = replace(load_on(server.urls["a"]), warmup=WarmUp(5, concurrency=2))
    result = await run_load(load)
    assert [row.index for row in result.rows] == list(range(20))
    assert [row.index for row in result.warmup] == [-1, -2, -3, -4, -5]
    assert all(row.end_s is not None and row.intended_s < 0 for row in result.warmup)
    assert all(row.end_s is not None and row.end_s <= 0 for row in result.warmup)
    assert summarise(result.rows, result.duration_s)["tokens"] == 200


@pytest.mark.parametrize("api", list(Api))
async def test_token_counts_are_those_of_the_usage_on_every_api(
    server: SimServer, api: Api
) -> None:
    result = await run_load(load_on(server.urls["b"], api=api))
    assert [row.ending for row in result.rows] == [Ending.OK] * 20
    assert [row.tokens for row in result.rows] == [10] * 20
    engine = server.drivers["b"].metrics
    assert sum(row.tokens or 0 for row in result.rows) == engine.generation_tokens
    assert sum(row.prompt_tokens or 0 for row in result.rows) == engine.prompt_tokens
    # A speculating engine sends several tokens at once: events are not tokens.
    assert sum(row.events for row in result.rows) < 200


async def test_several_targets_take_turns_and_one_that_is_dead_is_counted(
    server: SimServer,
) -> None:
    dead = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{dead.sockets[0].getsockname()[1]}"
    dead.close()
    await dead.wait_closed()
    result = await run_load(load_on(server.urls["a"], url))
    endings = {row.url: [r.ending for r in result.rows if r.url == row.url] for row in result.rows}
    assert endings == {server.urls["a"]: [Ending.OK] * 10, url: [Ending.CONNECT] * 10}


async def test_turns_of_a_conversation_carry_what_was_said_before(server: SimServer) -> None:
    load = load_on(server.urls["a"], requests=12)
    result = await run_load(replace(load, workload=replace(load.workload, turns=3)))
    assert sorted((row.index, row.turn) for row in result.rows) == [
        (index, turn) for index in range(4) for turn in range(3)
    ]
    by_turn = {(row.index, row.turn): row.prompt_tokens or 0 for row in result.rows}
    for index in range(4):
        first, second, third = (by_turn[index, turn] for turn in range(3))
        # 16 words asked and something answered more, at each turn.
        assert first + 16 < second < third - 16


async def test_stopping_keeps_what_was_measured(server: SimServer) -> None:
    stop = asyncio.Event()

    def show(at: Progress) -> None:
        if at.finished >= 1:
            stop.set()

    load = replace(load_on(server.urls["a"]), pacer=ClosedLoop(Ramp(((0.0, 2.0),)), duration_s=60))
    result = await run_load(load, show=show, stop=stop)
    assert result.interrupted
    assert result.duration_s < 30
    assert {row.ending for row in result.rows} <= {Ending.OK, Ending.CUT}
    assert Ending.OK in {row.ending for row in result.rows}


async def test_processes_share_the_requests_and_percentiles_are_of_all_rows(
    server: SimServer,
) -> None:
    load = replace(load_on(server.urls["a"], requests=31), warmup=WarmUp(3, concurrency=3))
    result = await run_load(load, processes=2)
    assert sorted(row.index for row in result.rows) == list(range(31))
    assert sorted(row.index for row in result.warmup) == [-3, -2, -1]
    assert (result.processes, result.gave_up, result.interrupted) == (2, None, False)
    found = summarise(result.rows, result.duration_s)
    ttfts = [(row.first_s - row.intended_s) * 1e3 for row in result.rows if row.first_s is not None]
    assert len(ttfts) == 31
    assert found["ttft_ms"] == {
        "p50": pytest.approx(np.percentile(ttfts, 50), abs=0.001),
        "p99": pytest.approx(np.percentile(ttfts, 99), abs=0.001),
    }


async def test_a_run_of_several_processes_can_be_stopped(server: SimServer) -> None:
    stop = asyncio.Event()
    pacer = OpenLoop([at / 20 for at in range(2000)])
    load = replace(load_on(server.urls["a"]), pacer=pacer)
    result = await run_load(
        load, processes=2, stop=stop, show=lambda at: stop.set() if at.finished > 3 else None
    )
    assert result.interrupted
    assert 3 < len(result.rows) < 2000


async def test_more_processes_than_allowed_are_refused(server: SimServer) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        await run_load(load_on(server.urls["a"]), processes=65)


def part(latencies: list[float], began: float) -> RunResult:
    rows = [
        RequestRow(n, began, began, 4, first_s=began + x, end_s=began + 2 * x, ending=Ending.OK)
        for n, x in enumerate(latencies)
    ]
    return RunResult(rows, 1.0, 0.5, array("d", [0.001]))


parts = st.lists(st.lists(st.floats(0.001, 100), min_size=1, max_size=20), min_size=1, max_size=5)


@given(parts)
def test_merged_percentiles_are_exactly_those_of_all_values(latencies: list[list[float]]) -> None:
    result = merged([part(each, float(n)) for n, each in enumerate(latencies)])
    every = [row.first_s - row.intended_s for row in result.rows if row.first_s is not None]
    assert len(every) == sum(map(len, latencies))
    found = summarise(result.rows, 1.0)["ttft_ms"]
    for key, share in (("p50", 50), ("p99", 99)):
        assert found[key] == pytest.approx(np.percentile(every, share) * 1e3, abs=0.00051)  # type: ignore[index]
    assert result.cpu_s == pytest.approx(0.5 * len(latencies))


def test_a_lost_process_is_told_and_the_others_are_kept() -> None:
    result = merged([part([1.0], 0.0), None])
    assert len(result.rows) == 1
    assert result.gave_up == "1 of 2 client processes ended early: their requests are lost"


def test_a_process_that_gave_up_does_not_end_the_run_of_another() -> None:
    gave_up = replace(part([1.0], 0.0), gave_up="refused")
    assert merged([gave_up, part([1.0], 0.0)]).gave_up is None
    assert merged([gave_up, gave_up]).gave_up == "refused"
