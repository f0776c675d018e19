"""A client that leaves stops the engine at once, and nothing is left of it."""

import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from router.settings import Timeouts
from tests.integration.rig import (
    BOTH_LOOPS,
    CHAT,
    DONE,
    PLAIN,
    STREAM,
    Call,
    Engine,
    Rig,
    event,
    request,
    running,
    until,
)

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]


async def in_prefill(call: Call) -> None:
    await call.gone()


async def after_the_head(call: Call) -> None:
    await call.stream_head()
    await call.gone()


async def in_mid_stream(call: Call) -> None:
    await call.stream_head()
    await call.chunk(event("a"))
    await call.gone()


async def in_a_plain_body(call: Call) -> None:
    await call.head(200, "content-length: 100")
    await call.write(b"{")
    await call.gone()


async def leave_when_it_is_under_way(rig: Rig, body: bytes, answered: bool) -> None:
    reader, writer = await rig.post(CHAT, body)
    if answered:
        await reader.readuntil(b"\r\n\r\n")
    else:
        await until(lambda: rig.spec.calls)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("script", "body", "answered"),
    [
        (in_prefill, STREAM, False),
        (in_prefill, PLAIN, False),
        (after_the_head, STREAM, False),
        (in_mid_stream, STREAM, True),
        (in_a_plain_body, PLAIN, True),
    ],
)
async def test_a_client_that_leaves_closes_and_aborts_upstream(
    script: Callable[[Call], Awaitable[None]], body: bytes, answered: bool
) -> None:
    async with running() as rig:
        rig.spec.script = script
        await leave_when_it_is_under_way(rig, body, answered)
        await until(lambda: rig.spec.calls[0].closed)
        rid = rig.spec.calls[0].json["rid"]
        await until(lambda: [call.json for call in rig.spec.aborts] == [{"rid": rid}])
        record = await rig.record()
        assert record.outcome == "client_disconnect"
        assert record.status == (200 if answered else 499)
        assert rig.health["spec"].transport_errors == 0
        await rig.settled()
        await until(lambda: rig.relay.attempts.aborter.pending == 0)
        assert rig.relay.attempts.aborter.sent == 1


async def test_an_abort_carries_the_requests_own_authorization() -> None:
    async with running() as rig:
        rig.spec.script = in_prefill
        _, writer = await rig.post(CHAT, PLAIN, "authorization: Bearer engine-key")
        await until(lambda: rig.spec.calls)
        writer.close()
        await until(lambda: rig.spec.aborts)
        assert rig.spec.aborts[0].header("authorization") == "Bearer engine-key"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages": [], "rid": "mine"}'),
        (CHAT, b'{"messages": [], "rid": null}'),
        (CHAT, b'{"messages": [], "n": 2}'),
        ("/v1/completions", b'{"prompt": ["a", "b"]}'),
        ("/v1/completions", b'{"prompt": ["a"]}'),
        ("/v1/completions", b'{"prompt": [[1, 2]]}'),
        ("/v1/responses", b'{"input": "a", "request_id": "mine"}'),
        ("/v1/responses", b'{"input": "a", "background": true}'),
        ("/generate", b'{"text": "a", "sampling_params": {"n": 2}}'),
        ("/v1/messages", b'{"messages": []}'),
        ("/v1/rerank", b'{"query": "a", "documents": ["b"]}'),
        (CHAT, b"not json"),
    ],
)
async def test_where_no_id_of_ours_belongs_the_body_is_untouched_and_closing_must_do(
    path: str, body: bytes
) -> None:
    async with running() as rig:
        rig.spec.script = in_prefill
        _, writer = await rig.post(path, body)
        await until(lambda: rig.spec.calls)
        writer.close()
        await until(lambda: rig.spec.calls[0].closed)
        await rig.record()
        assert rig.spec.calls[0].body == body
        assert rig.spec.aborts == []
        assert rig.relay.attempts.aborter.pending == 0
        await rig.settled()


async def test_a_failed_abort_is_counted_and_harms_nobody() -> None:
    async def refuse(call: Call) -> None:
        await call.reply(b"no", 401)

    async with running() as rig:
        rig.spec.script = in_prefill
        rig.spec.abort_script = refuse
        _, writer = await rig.post(CHAT, PLAIN)
        await until(lambda: rig.spec.calls)
        writer.close()
        await until(lambda: rig.relay.attempts.aborter.failed == 1)
        assert (await rig.record()).outcome == "client_disconnect"


async def test_a_client_that_leaves_while_it_sends_its_body_reaches_no_engine() -> None:
    async with running() as rig:
        head, _, body = request("POST", CHAT, PLAIN).partition(b"\r\n\r\n")
        _, writer = await rig.raw(head + b"\r\n\r\n" + body[:5])
        writer.close()
        record = await rig.record()
        assert (record.outcome, record.status, record.attempts) == ("client_disconnect", 499, 0)
        assert rig.spec.calls == []
        await rig.settled()


async def test_a_client_that_leaves_after_the_last_byte_has_been_served() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), DONE)

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await reader.readuntil(b"0\r\n\r\n")
        writer.transport.abort()
        assert (await rig.record()).outcome == "ok"
        assert rig.spec.aborts == []


async def test_one_connection_serves_the_next_request_after_a_stream() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), DONE)

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(request("POST", CHAT, STREAM) + request("POST", CHAT, STREAM))
        await reader.readuntil(b"0\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        await rig.record(3)
        assert [record.outcome for record in rig.observer.records] == ["ok"] * 3
        writer.close()


async def test_a_client_that_leaves_while_server_info_is_fetched_stops_that_too() -> None:
    async with running() as rig:
        rig.spec.script = in_prefill
        _, writer = await rig.raw(request("GET", "/server_info"))
        await until(lambda: rig.spec.calls)
        writer.close()
        await until(lambda: rig.spec.calls[0].closed)
        assert (await rig.record()).outcome == "client_disconnect"
        await rig.settled()


async def test_a_client_that_leaves_while_its_server_is_dialled_gives_its_lease_back() -> None:
    with contextlib.ExitStack() as sockets:
        deaf = sockets.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # what the kernel would accept for it
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        engine = Engine()
        engine.url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        timeouts = Timeouts(connect_s=2.0, first_byte_s=30.0, idle_s=30.0)
        async with running(engines={"spec": engine}, timeouts=timeouts) as rig:
            _, writer = await rig.post(CHAT, PLAIN)
            await until(lambda: len(rig.ledger) == 1)
            writer.close()
            await until(lambda: len(rig.ledger) == 0, patience_s=1.0)
            assert (await rig.record()).outcome == "client_disconnect"
            assert rig.health["spec"].transport_errors == 0
