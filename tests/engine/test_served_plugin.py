"""The plugin in SGLang's real HTTP server: its flags, its state, and streams across switches."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.harness.scenario import CHAIN_V2, TREE, Engine
from tests.engine.harness.serving import ServerProcess, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.anyio]

PATIENCE_S = 120.0
TOKENS = 40
CROWD = 5
PROMPTS = [f"{word} upon a time in a land far away" for word in ("once", "twice", "never")]
REQUEST = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SWITCHING = {
    "speculative_disable_batch_threshold": 2,
    "speculative_enable_batch_threshold": 2,
    "speculative_switch_dwell_steps": 1,
}
TRACE = "SGLANG_SPEC_SWITCH_TRACE"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(
    scope="module",
    params=[TREE, TREE.on_two_ranks(), CHAIN_V2.on_two_ranks()],
    ids=str,
)
def server(
    request: pytest.FixtureRequest, models: Path, folder: Path
) -> Iterator[tuple[ServerProcess, Path]]:
    """A switching server and the record of its decode steps."""
    engine: Engine = request.param
    trace = folder / (engine.name.replace("/", "-") + ".trace")
    environment = {TRACE: str(trace), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    if "tp_size" not in engine.options:
        del environment["SGLANG_CPU_OMP_THREADS_BIND"]
    switching = engine.with_options("switching", decode_log_interval=4, **SWITCHING)
    served = start_engine(switching, models, folder, environment)
    try:
        served.wait_until_healthy()
        yield served, trace
    finally:
        served.stop()


async def complete(server: ServerProcess, prompt: str, **more: Any) -> dict[str, Any]:
    body = {**REQUEST, "prompt": prompt, **more}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.post(server.url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def text_of(server: ServerProcess, prompt: str) -> str:
    reply = await complete(server, prompt)
    return reply["choices"][0]["text"]


async def streamed_text(server: ServerProcess, prompt: str) -> str:
    """The same as `text_of`, put together from a stream."""
    body = {**REQUEST, "prompt": prompt, "stream": True}
    text = ""
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def get(server: ServerProcess, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.get(server.url + path)


async def state_in_loads(server: ServerProcess) -> dict[str, Any]:
    return (await get(server, "/v1/loads")).json()["loads"][0]["spec_switch"]


async def metrics(server: ServerProcess) -> dict[str, float]:
    """The switch's samples by name and mode."""
    text = (await get(server, "/metrics")).text
    pattern = r"^sglang:spec_switch_(\w+){([^}]*)} (\S+)$"
    found: dict[str, float] = {}
    for name, labels, value in re.findall(pattern, text, re.MULTILINE):
        mode = re.search(r'\bmode="(\w+)"', labels)
        found[f"{name}/{mode[1]}" if mode else name] = float(value)
    return found


async def test_state_and_texts_across_switches(server: tuple[ServerProcess, Path]) -> None:
    """One request speculates, five do not, and one speculates again; every text stays the same."""
    served, trace = server
    started = await state_in_loads(served)
    assert started["state"] in ("armed", "active")  # a health check may have decoded already
    assert started["threshold"] == 2

    alone = [await text_of(served, prompt) for prompt in PROMPTS]
    state = await state_in_loads(served)
    assert (state["state"], state["mode"], state["off_share"]) == ("active", "on", 0)
    assert state["accept_length_on"] > 1

    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(CROWD)]
    together = await asyncio.gather(*(text_of(served, prompt) for prompt in prompts))
    assert together == [alone[i % len(PROMPTS)] for i in range(CROWD)]
    state = await state_in_loads(served)
    assert 0 < state["off_share"] < 1
    assert state["steps"]["off"] > 0
    assert state["switches_total"] >= 1

    assert [await text_of(served, prompt) for prompt in PROMPTS] == alone
    state = await state_in_loads(served)
    assert state["mode"] == "on"
    assert state["switches_total"] >= 2

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    decided: dict[int, list[tuple[int, str, int]]] = {}
    for line in lines:
        decided.setdefault(line["rank"], []).append((line["step"], line["mode"], line["batch"]))
    assert all(steps == decided[0] for steps in decided.values())
    assert {mode for _, mode, _ in decided[0]} == {"on", "off"}
    assert all((mode == "off") == (batch > 2) for _, mode, batch in decided[0])


async def test_server_info_and_metrics_say_the_same(server: tuple[ServerProcess, Path]) -> None:
    served, _ = server
    await asyncio.gather(*(text_of(served, PROMPTS[0]) for _ in range(CROWD)))
    await complete(served, PROMPTS[1], max_tokens=60)
    state = await state_in_loads(served)
    info = (await get(served, "/server_info")).json()
    assert info["internal_states"][0]["spec_switch"]["steps"] == state["steps"]
    seen = await metrics(served)
    assert {"state", "on", "threshold", "accept_length_on"} <= set(seen)
    assert seen["threshold"] == 2
    for mode in ("on", "off"):
        assert 0 < seen[f"steps_total/{mode}"] <= state["steps"][mode]
    assert seen["switches_total"] >= 1


async def test_several_choices_and_streams_cross_switches(
    server: tuple[ServerProcess, Path],
) -> None:
    served, _ = server
    expected = await text_of(served, PROMPTS[2])
    before = (await state_in_loads(served))["switches_total"]
    reply, stream = await asyncio.gather(
        complete(served, PROMPTS[2], n=4), streamed_text(served, PROMPTS[2])
    )
    assert [choice["text"] for choice in reply["choices"]] == [expected] * 4
    assert stream == expected
    assert (await state_in_loads(served))["switches_total"] > before
