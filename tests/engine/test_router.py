"""The router in front of two real SGLang servers, asked by the official OpenAI client."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from loadtest.children import free_port
from tests.engine.harness.scenario import PLAIN, TREE
from tests.engine.harness.serving import ServerProcess, start, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.anyio]

MODEL = "tiny"
CAPACITY = 8  # max_running_requests of the servers
PATIENCE_S = 60.0
MESSAGES: Any = [{"role": "user", "content": "the rain in spain"}]
ENDLESS: Any = {"ignore_eos": True}
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": ENDLESS}
SHORT = {"max_tokens": 48, "temperature": 0, "extra_body": ENDLESS}


@dataclass(frozen=True)
class Pair:
    spec: ServerProcess
    base: ServerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def pair(models: Path, folder: Path) -> Iterator[Pair]:
    servers = [start_engine(engine, models, folder) for engine in (TREE, PLAIN)]
    try:
        for server in servers:
            server.wait_until_healthy()
        yield Pair(*servers)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Callable[[ServerProcess, ServerProcess, str], ServerProcess]]:
    """Start a router before a pair of servers."""
    routers: list[ServerProcess] = []

    def begin(spec: ServerProcess, base: ServerProcess, policy: str) -> ServerProcess:
        port = free_port()
        addresses = ["--spec-url", spec.url, "--base-url", base.url, "--host", "127.0.0.1"]
        command = ["-m", "router", "serve", *addresses, "--port", str(port), "--policy", policy]
        router = start(f"router-{port}", command, f"http://127.0.0.1:{port}", folder)
        routers.append(router)
        router.wait_until_healthy("/readyz")
        return router

    yield begin
    for router in routers:
        router.stop()


@pytest.fixture(scope="module", params=["spec-only", "base-only"])
def router(
    request: pytest.FixtureRequest, pair: Pair, serve: Callable[..., ServerProcess]
) -> ServerProcess:
    return serve(pair.spec, pair.base, request.param)


@pytest.fixture
def behind(router: ServerProcess, pair: Pair, request: pytest.FixtureRequest) -> ServerProcess:
    """The server that this router's policy uses."""
    policy = request.node.callspec.params["router"]
    return pair.spec if policy == "spec-only" else pair.base


@pytest.fixture
async def ask() -> AsyncIterator[Callable[[ServerProcess], AsyncOpenAI]]:
    """Make OpenAI clients that are closed in the end."""
    clients: list[AsyncOpenAI] = []

    def client(server: ServerProcess) -> AsyncOpenAI:
        made = AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        clients.append(made)
        return made

    yield client
    for made in clients:
        await made.close()


Ask = Callable[[ServerProcess], AsyncOpenAI]


async def streamed(client: AsyncOpenAI, **arguments: Any) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens of a chat stream."""
    text, reason, tokens = "", "", 0
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **arguments,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, reason, tokens


async def whole(client: AsyncOpenAI, **arguments: Any) -> tuple[str, str, int]:
    """The same of a chat completion that comes in one piece."""
    reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **arguments)
    (choice,) = reply.choices
    assert reply.usage is not None
    return choice.message.content or "", choice.finish_reason, reply.usage.completion_tokens


async def engine_load(server: ServerProcess) -> tuple[int, int]:
    """Requests running and waiting by the engine's own count."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        load = (await client.get(server.url + "/v1/loads")).json()["loads"][0]
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def aborted(server: ServerProcess) -> float:
    """Requests that the engine has aborted so far."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        text = (await client.get(server.url + "/metrics")).text
    name = "sglang:num_aborted_requests_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def until(wanted: object, observe: Callable[[], Awaitable[object]]) -> None:
    """Poll until an observation is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while (seen := await observe()) != wanted:
        assert time.monotonic() < deadline, f"still {seen}, not {wanted}"
        await asyncio.sleep(0.02)


async def broken_off(chunks: AsyncIterator[bytes]) -> bytes:
    """Read a body that ends without its proper end."""
    received = b""
    try:
        async for chunk in chunks:
            received += chunk
    except httpx.RemoteProtocolError:
        return received
    raise AssertionError("the body ended as if it were complete")


async def test_the_text_is_the_servers_own(
    router: ServerProcess, behind: ServerProcess, pair: Pair, ask: Ask
) -> None:
    expected = await whole(ask(behind), **SHORT)
    assert expected[1:] == ("length", 48)
    assert await whole(ask(router), **SHORT) == expected
    assert await streamed(ask(router), **SHORT) == expected
    assert await whole(ask(pair.base), **SHORT) == expected


async def test_the_policys_server_answers(
    router: ServerProcess, behind: ServerProcess, ask: Ask
) -> None:
    raw = await ask(router).chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, **SHORT
    )
    role = {"tree": "spec", "plain": "base"}[behind.name.split("-")[0]]
    assert raw.headers["x-crossover-server"] == role


async def test_completions_and_several_choices_pass(
    router: ServerProcess, behind: ServerProcess, ask: Ask
) -> None:
    async def complete(server: ServerProcess) -> list[str]:
        reply = await ask(server).completions.create(
            model=MODEL, prompt=["once upon", "a time"], n=2, **SHORT
        )
        return [choice.text for choice in reply.choices]

    assert await complete(router) == await complete(behind)


async def test_a_stream_without_counts_is_counted_by_the_models_own_vocabulary(
    router: ServerProcess, ask: Ask
) -> None:
    async def log() -> str:
        return router.log.read_text()

    async def knows() -> bool:
        return (await log()).count("has a vocabulary of") == 2

    await until(True, knows)
    before = len(await log())
    stream = await ask(router).chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, **SHORT
    )
    async for _ in stream:
        pass

    async def counted() -> list[tuple[int, bool]]:
        lines = [json.loads(line) for line in (await log())[before:].splitlines()]
        return [(e["output_tokens"], e["tokens_exact"]) for e in lines if "output_tokens" in e]

    await until([(SHORT["max_tokens"], False)], counted)


async def test_models_and_errors_pass(router: ServerProcess, ask: Ask) -> None:
    assert [model.id async for model in ask(router).models.list()] == [MODEL]
    with pytest.raises(APIError) as error:
        await whole(ask(router), max_tokens=100_000)
    assert error.value.body is not None


async def test_a_client_that_leaves_in_mid_stream_frees_the_engine(
    router: ServerProcess, behind: ServerProcess, ask: Ask
) -> None:
    before = await aborted(behind)
    stream = await ask(router).chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, **LONG
    )
    for _ in range(3):
        await anext(stream)
    assert await engine_load(behind) == (1, 0)
    await stream.close()
    await until((0, 0), lambda: engine_load(behind))
    assert await aborted(behind) == before + 1


async def test_a_client_that_leaves_a_whole_reply_frees_the_engine(
    router: ServerProcess, behind: ServerProcess, ask: Ask
) -> None:
    before = await aborted(behind)
    reply = asyncio.create_task(whole(ask(router), **LONG))
    await until((1, 0), lambda: engine_load(behind))
    reply.cancel()
    await until((0, 0), lambda: engine_load(behind))
    assert await aborted(behind) == before + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_frees_the_engine(
    router: ServerProcess, behind: ServerProcess, ask: Ask, stream: bool
) -> None:
    client = ask(router)
    running = [asyncio.create_task(whole(client, **LONG)) for _ in range(CAPACITY)]
    await until((CAPACITY, 0), lambda: engine_load(behind))
    waiting = asyncio.create_task((streamed if stream else whole)(ask(router), **LONG))
    await until((CAPACITY, 1), lambda: engine_load(behind))
    waiting.cancel()
    await until((CAPACITY, 0), lambda: engine_load(behind))
    for task in running:
        task.cancel()
    await until((0, 0), lambda: engine_load(behind))


async def test_the_other_server_takes_over_when_one_is_killed_in_mid_stream(
    pair: Pair, models: Path, folder: Path, serve: Callable[..., ServerProcess], ask: Ask
) -> None:
    victim = start_engine(PLAIN, models, folder)
    try:
        victim.wait_until_healthy()
        router = serve(pair.spec, victim, "base-only")
        expected = await whole(ask(pair.spec), **SHORT)
        stream = await ask(router).chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, **LONG
        )
        await anext(stream)
        body = {"model": MODEL, "prompt": "once", "max_tokens": 900, "stream": True, **ENDLESS}
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as client,
            client.stream("POST", router.url + "/v1/completions", json=body) as raw,
        ):
            chunks = raw.aiter_bytes()
            received = await anext(chunks)
            await until((2, 0), lambda: engine_load(victim))
            victim.kill()
            with pytest.raises(APIError):
                async for _ in stream:
                    pass
            received += await broken_off(chunks)
        *_, last, end = received.decode().split("\n\n")
        assert end == ""
        assert json.loads(last.removeprefix("data: "))["error"]["message"]
        assert b"[DONE]" not in received
        assert await whole(ask(router), **SHORT) == expected
        assert await streamed(ask(router), **SHORT) == expected
    finally:
        victim.stop()
