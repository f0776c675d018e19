"""The client against engines whose figures are known: what it reports is what is true.

Engines are slow ones, so that 2% is more than the client or a busy machine adds to a median.
"""

import pytest

from loadtest.engine_params import Acceptance, DecodeMode, EngineParams
from loadtest.load import Load
from loadtest.pacing import ClosedLoop, OpenLoop, Ramp
from loadtest.record import RunResult
from loadtest.runner import run_load
from loadtest.sim_server import MODEL_NAME, EngineSpec, SimServer
from loadtest.stats import summarise
from loadtest.target import Target
from loadtest.workload import Api, Fixed, Workload

pytestmark = pytest.mark.anyio

PROMPT_TOKENS, OUTPUT_TOKENS = 60, 12
PREFILL_PASS_S, PREFILL_TOKEN_S = 0.2, 0.005
STEP_S = {1: 0.05, 8: 0.1}
TRIES = 3


def engine(acceptance: Acceptance | None = None) -> EngineParams:
    return EngineParams(
        name="known",
        source="made up",
        decode=DecodeMode(tuple(STEP_S.items()), acceptance),
        prefill_pass_s=PREFILL_PASS_S,
        prefill_token_s=PREFILL_TOKEN_S,
        kv_tokens=100_000,
    )


async def measure(
    params: EngineParams, pacer: ClosedLoop | OpenLoop, output_tokens: int = OUTPUT_TOKENS
) -> RunResult:
    """Run on a machine that kept up with the engine model; try again where it did not."""
    for _ in range(TRIES):
        async with SimServer([EngineSpec("known", params)]) as server:
            target = Target.parse(server.urls["known"], Api.COMPLETIONS)
            workload = Workload(
                MODEL_NAME, Fixed(PROMPT_TOKENS, output_tokens), seed=1, api=Api.COMPLETIONS
            )
            result = await run_load(Load((target,), workload, pacer))
            if not server.drivers["known"].lag.slipped_s:
                return result
    pytest.fail("this machine is too slow for the engine model")


def closed(level: int, requests: int) -> ClosedLoop:
    return ClosedLoop(Ramp(((0.0, float(level)),)), requests=requests)


async def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    result = await measure(engine(), closed(1, 3))
    found = summarise(result.rows, result.duration_s)
    ttft_s = PREFILL_PASS_S + PREFILL_TOKEN_S * PROMPT_TOKENS
    e2e_s = ttft_s + STEP_S[1] * (OUTPUT_TOKENS - 1)
    assert found["ttft_ms"]["p50"] == pytest.approx(ttft_s * 1e3, rel=0.02)  # type: ignore[index]
    assert found["itl_ms"]["p50"] == pytest.approx(STEP_S[1] * 1e3, rel=0.02)  # type: ignore[index]
    assert found["e2e_ms"]["p50"] == pytest.approx(e2e_s * 1e3, rel=0.02)  # type: ignore[index]
    assert found["tok_s"] == pytest.approx(OUTPUT_TOKENS / e2e_s, rel=0.02)
    assert [row.prompt_tokens for row in result.rows] == [PROMPT_TOKENS] * 3


async def test_many_requests_at_once_go_at_the_pace_of_their_batch() -> None:
    result = await measure(engine(), closed(8, 8), output_tokens=24)
    found = summarise(result.rows, result.duration_s)
    assert found["itl_ms"]["p50"] == pytest.approx(STEP_S[8] * 1e3, rel=0.02)  # type: ignore[index]
    assert found["tokens"] == 8 * 24


async def test_an_engine_that_sends_two_tokens_a_step_is_twice_as_fast() -> None:
    always_two = Acceptance(mean=2.0, longest=2, spread=0.0)
    result = await measure(engine(always_two), closed(1, 2), output_tokens=25)
    found = summarise(result.rows, result.duration_s)
    # The first token comes of the prefill, the other 24 of 12 steps.
    assert [(row.tokens, row.events) for row in result.rows] == [(25, 13)] * 2
    share = 13 / 25
    assert found["itl_ms"]["p50"] == pytest.approx(STEP_S[1] * share * 1e3, rel=0.02)  # type: ignore[index]


async def test_a_queue_shows_in_the_latency_of_an_open_loop() -> None:
    """Arrivals at once at an engine that prefills one after the other wait for each other."""
    result = await measure(engine(), OpenLoop([0.0, 0.1]), output_tokens=1)
    ttft_s = PREFILL_PASS_S + PREFILL_TOKEN_S * PROMPT_TOKENS
    ttfts = [(row.first_s or 0.0) - row.intended_s for row in result.rows]
    assert ttfts == pytest.approx([ttft_s, 2 * ttft_s - 0.1], rel=0.02)
