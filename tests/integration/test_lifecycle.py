"""SIGTERM on the real command: what is under way ends well, or is told why it does not."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from tests.integration.processes import (
    DEADLINE_S,
    Router,
    chat,
    client_of,
    ready,
    router,
    until,
)
from tests.integration.rig import CHAT, DONE, Call, Engine, event

pytestmark = pytest.mark.anyio

HEALTH = "/healthz"


@dataclass
class Slow:
    """An engine whose answers begin at once and end when they are let go."""

    engine: Engine
    go: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    first: bytes = event("one")

    async def script(self, call: Call) -> None:
        if call.target != CHAT:
            await call.reply(b"{}")
            return
        if not call.json.get("stream"):
            self.begun += 1
            await self._let_go(call)
            await call.reply(b'{"ok": true}')
            return
        await call.stream_head()
        self.begun += 1
        await call.chunk(self.first)
        await self._let_go(call)
        for data in (event("two"), DONE):
            await call.chunk(data)
        await call.end()

    async def _let_go(self, call: Call) -> None:
        going = asyncio.ensure_future(self.go.wait())
        gone = asyncio.ensure_future(call.reader.read(1))
        await asyncio.wait((going, gone), return_when=asyncio.FIRST_COMPLETED)
        left = gone.done()
        for task in (going, gone):
            task.cancel()
        await asyncio.wait((going, gone))
        if left:
            raise ConnectionResetError


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[Router, httpx.AsyncClient, Slow]]:
    slow = Slow(Engine())
    slow.engine.script = slow.script
    await slow.engine.start()
    try:
        url = ("--base-url", slow.engine.url, "--policy", "base-only")
        async with router(*url, *arguments) as made, client_of(made) as client:
            await ready(client, "base")
            yield made, client, slow
    finally:
        await slow.engine.stop()


def no_errors(made: Router) -> bool:
    return made.errors == [] and not made.logged(level="error")


async def _read_on(chunks: AsyncIterator[bytes], into: list[bytes]) -> None:
    async for chunk in chunks:
        into.append(chunk)  # noqa: PERF401  (what came before an error counts)


async def told_to_stop(made: Router) -> None:
    await until(lambda: [line for line in made.lines if "stopping" in line])


async def test_at_sigterm_new_work_is_refused_and_a_stream_goes_on_to_its_end() -> None:
    async with serving() as (made, client, slow):
        body = {"stream": True}
        async with client.stream("POST", CHAT, json=body) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            made.signal(signal.SIGTERM)
            await told_to_stop(made)

            not_ready = await client.get("/readyz")
            assert not_ready.status_code == 503
            assert not_ready.json()["reason"] == "shutting down"
            assert (await client.get(HEALTH)).status_code == 200
            refused = await chat(client)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert slow.begun == 1

            slow.go.set()
            rest = b"".join([chunk async for chunk in chunks])
            assert rest.endswith(DONE)
        assert await made.ended() == 0
    assert no_errors(made)


async def test_after_the_drain_timeout_streams_get_an_error_event_and_others_a_503() -> None:
    async with serving("--drain-timeout-s", "0.3") as (made, client, slow):
        async with client.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            read = [await anext(chunks)]
            plain = asyncio.create_task(client.post(CHAT, json={}))
            await until(lambda: slow.begun == 2)
            made.signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await _read_on(chunks, read)
        text = b"".join(read)
        assert text.startswith(event("one"))
        assert b'"code":"shutting_down"' in text
        assert text.endswith(b"}\n\n")
        assert b"[DONE]" not in text
        answer = await plain
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert await made.ended() == 0
    assert no_errors(made)
    assert {line["outcome"] for line in made.logged(message="request")} == {"truncated", "rejected"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
async def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    async with serving("--drain-timeout-s", "3600") as (made, client, _):
        async with client.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            made.signal(number)
            await told_to_stop(made)
            assert made.process.returncode is None
            made.signal(number)
            with pytest.raises(httpx.RemoteProtocolError):
                await _read_on(chunks, [])
        assert await made.ended() == 0
    assert no_errors(made)


async def test_idle_connections_close_at_sigterm_while_a_stream_holds_the_router() -> None:
    async with serving() as (made, client, slow):
        host, port = made.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"live")).startswith(b"HTTP/1.1 200")
        async with client.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            made.signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                await reader.read()
            assert made.process.returncode is None
            slow.go.set()
            async for _chunk in chunks:
                pass
        writer.close()
        assert await made.ended() == 0
    assert no_errors(made)


async def test_a_client_that_does_not_read_its_last_words_does_not_hold_the_end_up() -> None:
    async with serving("--drain-timeout-s", "0") as (made, _, slow):
        slow.first = event("x" * 2**23)
        host, port = made.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = b'{"stream": true}'
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: slow.begun == 1)
        assert await made.terminate() == 0
        writer.close()
    assert no_errors(made)


async def test_with_nothing_under_way_it_ends_without_waiting() -> None:
    async with serving("--drain-timeout-s", "3600") as (made, client, _):
        assert (await client.get(HEALTH)).status_code == 200
        assert await made.terminate() == 0
    assert no_errors(made)
