"""Streams: when they are committed, and what a client sees when they go wrong."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterable
from typing import TypeVar

import httpx
import openai
import pytest

from router.settings import Timeouts
from tests.integration.rig import (
    BOTH_LOOPS,
    CHAT,
    DONE,
    STREAM,
    Call,
    Engine,
    event,
    running,
    until,
)

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]

QUEUE_FULL = (
    b'data: {"error": {"object": "error", "message": "The request queue is full.", '
    b'"type": "ServiceUnavailable", "param": null, "code": 503}}\n\n'
)

T = TypeVar("T")


async def collect(source: AsyncIterable[T], into: list[T]) -> None:
    async for item in source:
        into.append(item)  # noqa: PERF401  (what came before a failure is wanted too)


async def test_nothing_is_sent_before_the_first_event_is_complete() -> None:
    steps = [asyncio.Event() for _ in range(3)]

    async def script(call: Call) -> None:
        await call.stream_head()
        await steps[0].wait()
        await call.chunk(b": keep-alive\n\n" + event("a")[:20])
        await steps[1].wait()
        await call.chunk(event("a")[20:])
        await steps[2].wait()
        await call.chunk(DONE)
        await call.end()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await until(lambda: rig.spec.calls)
        steps[0].set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        assert rig.ledger.load("spec").prefill_sequences == 1
        steps[1].set()
        assert b" 200 " in await reader.readline()
        assert rig.ledger.load("spec").decode_sequences == 1
        steps[2].set()
        await rig.record()
        writer.close()


async def test_a_first_event_that_never_ends_is_let_through_at_64_kib() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        for _ in range(9):
            await call.chunk(b"data: " + b"x" * 8192)
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        assert b" 200 " in await reader.readline()
        writer.close()
        assert (await rig.record()).outcome == "client_disconnect"


async def test_queue_full_inside_a_200_becomes_a_503() -> None:
    async def script(call: Call) -> None:
        await call.stream(QUEUE_FULL, DONE)

    async with running(engines={"spec": Engine(script)}) as rig:
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "The request queue is full."
        assert response.headers["content-type"] == "application/json"
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-crossover-server"] == "spec"
        record = await rig.record()
        assert (record.outcome, record.status) == ("upstream_overload", 503)
        assert rig.health["spec"].up
        await rig.settled()


async def test_an_abort_inside_a_generate_stream_becomes_its_status() -> None:
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    data = json.dumps({"text": "", "meta_info": {"finish_reason": reason}}).encode()

    async def script(call: Call) -> None:
        await call.stream(b"data: " + data + b"\n\n", DONE)

    async with running(engines={"spec": Engine(script)}) as rig:
        response = await rig.http.post("/generate", content=b'{"text": "a", "stream": true}')
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "The request queue is full."


@pytest.mark.parametrize("first", [b"", event("a")])
async def test_an_error_in_a_200_is_not_recorded_as_success(first: bytes) -> None:
    error = b'data: {"error": {"message": "out of memory"}}\n\n'

    async def script(call: Call) -> None:
        await call.stream_head()
        if first:
            await call.chunk(first)
        await call.chunk(error)
        await call.chunk(DONE)
        await call.end()

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.content) == (200, first + error + DONE)
        assert (await rig.record()).outcome == "upstream_error"


async def test_a_stream_that_dies_ends_with_an_error_event_and_a_broken_body() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.chunk(event("b"))
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        wire = await reader.read()
        assert b"[DONE]" not in wire
        assert not wire.endswith(b"0\r\n\r\n")
        events = [line for line in wire.split(b"\r\n") if line.startswith(b"data: ")]
        assert events[:2] == [event("a"), event("b")]
        error = json.loads(events[2].removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("upstream_error", "upstream_broken")
        record = await rig.record()
        assert (record.outcome, record.status) == ("upstream_error", 200)
        writer.close()
        await rig.settled()


async def test_an_event_that_was_cut_is_ended_before_the_error_event() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a") + event("b")[:17])
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        parts: list[bytes] = []
        async with rig.http.stream("POST", CHAT, content=STREAM) as response:
            with pytest.raises(httpx.RemoteProtocolError):
                await collect(response.aiter_raw(), parts)
        body = b"".join(parts)
        whole, cut, error, rest = body.split(b"\n\n")
        assert whole + b"\n\n" == event("a")
        assert cut == event("b")[:17]
        assert error.startswith(b'data: {"error":')
        assert rest == b""


async def test_the_official_client_raises_when_a_stream_dies() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        async with openai.AsyncOpenAI(
            api_key="none", base_url=f"{rig.url}/v1", max_retries=0
        ) as client:
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
            chunks: list[openai.types.chat.ChatCompletionChunk] = []
            with pytest.raises(openai.APIError, match="Server spec broke off its answer"):
                await collect(stream, chunks)
            assert [chunk.choices[0].delta.content for chunk in chunks] == ["a"]


@pytest.mark.parametrize("sent", [[], [event("a")]])
async def test_a_stream_that_ends_without_its_end_is_no_success(sent: list[bytes]) -> None:
    async def script(call: Call) -> None:
        await call.stream(*sent)

    async with running() as rig:
        rig.spec.script = script
        if sent:
            with pytest.raises(httpx.RemoteProtocolError):
                await rig.http.post(CHAT, content=STREAM)
        else:
            response = await rig.http.post(CHAT, content=STREAM)
            assert response.status_code == 502
            assert response.headers["x-crossover-error"] == "upstream_truncated"
        assert (await rig.record()).outcome == "truncated"


@pytest.mark.parametrize(
    "end",
    [
        [b"data:[DONE]\n\n"],
        [DONE, b": the end of the keep-alives, in a comment of more than any tail has\n\n"],
        [DONE + b": bye\n\n"],
        [DONE, b": bye\n\n", b": bye\n\n"],
        [b"data: [DONE]\r\n\r\n"],
    ],
)
async def test_an_end_may_be_spelt_otherwise_and_have_comments_behind_it(end: list[bytes]) -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), *end)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.content == event("a") + b"".join(end)
        assert (await rig.record()).outcome == "ok"


async def test_a_comment_is_no_end() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), b": [DONE]\n\n")

    async with running() as rig:
        rig.spec.script = script
        with pytest.raises(httpx.RemoteProtocolError):
            await rig.http.post(CHAT, content=STREAM)
        assert (await rig.record()).outcome == "truncated"


async def test_a_stream_of_responses_ends_as_it_likes_and_counts_its_first_delta() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(b'event: response.created\ndata: {"type":"response.created"}\n\n')
        await go_on.wait()
        await call.chunk(b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n')
        await call.end()

    async with running() as rig:
        rig.spec.script = script
        body = b'{"input": "a", "stream": true}'
        reader, writer = await rig.post("/v1/responses", body)
        assert b" 200 " in await reader.readline()
        assert rig.ledger.load("spec").prefill_sequences == 1
        go_on.set()
        assert (await rig.record()).outcome == "ok"
        assert rig.spec.calls[0].json["request_id"].startswith("resp_")
        writer.close()


async def test_a_plain_body_cut_short_breaks_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.head(200, "content-type: application/json", "content-length: 100")
        await call.write(b'{"half":')
        call.writer.close()
        call.closed = True

    async with running() as rig:
        rig.spec.script = script
        with pytest.raises(httpx.RemoteProtocolError):
            await rig.http.post(CHAT, content=STREAM)
        assert (await rig.record()).outcome == "truncated"


@pytest.mark.parametrize(
    "garbage",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nbroken header\r\n\r\n", b"\x00" * 100,
     b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
     b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
     b"HTTP/1.1 600 X\r\ncontent-length: 0\r\n\r\n",
     b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000],
)  # fmt: skip
async def test_garbage_becomes_a_502(garbage: bytes) -> None:
    async def script(call: Call) -> None:
        await call.write(garbage)
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 502
        assert response.headers["x-crossover-error"] == "upstream_broken"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (await rig.record()).outcome == "upstream_error"
        await rig.settled()


async def test_garbage_in_mid_stream_becomes_an_error_event() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.write(b"zz\r\nnot a chunk\r\n")
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        wire = await reader.read()
        assert b'data: {"error":' in wire
        assert not wire.endswith(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_an_engine_that_hangs_up_without_a_word_becomes_a_502(method: str) -> None:
    async def script(call: Call) -> None:
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        path = CHAT if method == "POST" else "/v1/models"
        response = await rig.http.request(
            method, path, content=STREAM if method == "POST" else None
        )
        assert response.status_code == 502
        assert len(rig.spec.calls) == 1
        assert rig.base.calls == []
        assert (await rig.record()).outcome == "upstream_error"


async def test_a_post_on_a_connection_that_went_stale_is_not_sent_twice() -> None:
    first = True

    async def script(call: Call) -> None:
        nonlocal first
        if first:
            first = False
            await call.reply(b"{}")
        else:
            call.reset()

    async with running() as rig:
        rig.spec.script = script
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 502
        assert len(rig.spec.calls) == 2
        assert rig.base.calls == []


async def test_a_get_on_a_connection_that_went_stale_is_sent_again() -> None:
    async def script(call: Call) -> None:
        if len(rig.spec.calls) == 2:
            call.reset()
        else:
            await call.reply(b"{}")

    async with running() as rig:
        rig.spec.script = script
        assert (await rig.http.get("/v1/models")).status_code == 200
        assert (await rig.http.get("/v1/models")).status_code == 200
        assert [call.connection for call in rig.spec.calls] == [1, 1, 2]
        assert (await rig.record(2)).attempts == 1


async def test_a_connection_that_the_engine_closed_while_idle_is_not_used() -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}")
        call.closed = True  # without saying so in the head

    async with running() as rig:
        rig.spec.script = script
        for number in range(3):
            assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
            await until(lambda: rig.pools["spec"].open_connections == 0)
            assert rig.spec.connections == number + 1


async def test_idle_connections_expire_before_the_engine_closes_them() -> None:
    async with running(keepalive_s=0.05) as rig:
        await rig.http.post(CHAT, content=STREAM)
        assert rig.pools["spec"].open_connections == 1
        await until(lambda: rig.pools["spec"].open_connections == 0)
        assert rig.pools["spec"].idle_connections == 0
        await until(lambda: rig.spec.open_connections == 0)


async def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}")
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        await until(lambda: rig.spec.open_connections == 0)


async def test_silence_before_the_first_byte_becomes_a_504() -> None:
    async def script(call: Call) -> None:
        await call.gone()

    timeouts = Timeouts(connect_s=1.0, first_byte_s=0.1, idle_s=30.0)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 504
        assert response.headers["x-crossover-error"] == "first_byte_timeout"
        record = await rig.record()
        assert record.outcome == "timeout"
        rid = rig.spec.calls[0].json["rid"]
        await until(lambda: [call.json["rid"] for call in rig.spec.aborts] == [rid])
        await rig.settled()


async def test_a_head_without_an_event_is_bounded_by_the_first_byte_limit() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.gone()

    timeouts = Timeouts(connect_s=1.0, first_byte_s=0.1, idle_s=30.0)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = script
        response = await rig.http.post("/generate", content=b'{"text": "a", "stream": true}')
        assert response.status_code == 504


async def test_silence_in_mid_stream_ends_it_with_an_error_event() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    timeouts = Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.1)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        wire = await reader.read()
        assert b'"code":"idle_timeout"' in wire
        assert (await rig.record()).outcome == "timeout"
        await until(lambda: len(rig.spec.aborts) == 1)
        writer.close()


async def test_a_stream_may_last_longer_than_every_limit() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        for _ in range(20):
            await call.chunk(event("a"))
            await asyncio.sleep(0.05)
        await call.chunk(DONE)
        await call.end()

    timeouts = Timeouts(connect_s=0.5, first_byte_s=0.5, idle_s=0.5)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = script
        assert (await rig.http.post(CHAT, content=STREAM)).content.endswith(DONE)
        record = await rig.record()
        assert record.outcome == "ok"
        assert record.duration_s > timeouts.idle_s


async def test_a_connection_whose_request_was_answered_unread_is_used_no_more() -> None:
    class Hasty(Engine):
        """Answers before it has read the body."""

        async def _read(
            self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
        ) -> Call | None:
            head = await reader.readuntil(b"\r\n\r\n")
            return Call(reader, writer, number, "POST", head.split()[1].decode(), [], b"")

    async def refuse(call: Call) -> None:
        await call.reply(b"{}", 413)
        with contextlib.suppress(ConnectionError):
            await call.reader.read()
        call.closed = True

    async with running(engines={"spec": Hasty(refuse)}, body_bytes=2**24) as rig:
        for connection in (1, 2):
            big = b'{"rid":"mine","x":"' + b"x" * 2**24
            response = await rig.http.post(CHAT, content=big[: 2**24])
            assert response.status_code == 413
            assert rig.spec.connections == connection
