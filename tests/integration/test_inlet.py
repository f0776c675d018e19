"""What clients may send: heads, offers to upgrade, and requests behind one another."""

import asyncio
import contextlib
import socket

import pytest

from router.dataplane.inlet import HEAD_BYTES_MAX, QUEUED_MAX
from router.settings import Timeouts
from tests.integration.rig import (
    BOTH_LOOPS,
    CHAT,
    DONE,
    OWN_PATH,
    PATIENCE_S,
    Call,
    event,
    request,
    running,
    until,
    until_set,
)

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]

BODY = b'{"messages":[],"rid":"mine"}'
OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")


async def test_a_request_that_offers_an_upgrade_keeps_its_body() -> None:
    async with running() as rig:
        reader, writer = await rig.post(CHAT, BODY, *OFFER)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        call = rig.spec.calls[0]
        assert call.body == BODY
        assert call.header("upgrade") is None
        assert call.header("http2-settings") is None
        writer.close()


async def test_a_body_may_come_long_after_an_offer_and_a_request_behind_it() -> None:
    wire = request("POST", CHAT, BODY, *OFFER) + request("POST", CHAT, BODY + b" ")
    async with running() as rig:
        reader, writer = await rig.raw(b"")
        for at in range(len(wire)):
            writer.write(wire[at : at + 1])
            await writer.drain()
        for _ in range(2):
            await reader.readuntil(b'{"ok": true}')
        assert [call.body for call in rig.spec.calls] == [BODY, BODY + b" "]
        writer.close()


@pytest.mark.parametrize(
    "request_line", [b"CONNECT engine:80 HTTP/1.1", b"GET http://engine HTTP/1.1", b"\x16\x03\x01"]
)
async def test_what_is_no_request_to_a_server_is_refused(request_line: bytes) -> None:
    async with running() as rig:
        reader, writer = await rig.raw(request_line + b"\r\nhost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 400")
        assert not rig.spec.calls
        writer.close()


@pytest.mark.parametrize("start", [b"GET /v1/models HTTP/1.1\r\nx: ", b"GET /"])
async def test_a_head_without_end_is_refused_and_not_kept(start: bytes) -> None:
    async with running() as rig:
        reader, writer = await rig.raw(start + b"x" * (HEAD_BYTES_MAX + 1 - len(start)))
        answer = await asyncio.wait_for(reader.readuntil(b"too long."), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 400")
        assert not rig.spec.calls
        writer.close()


async def test_the_bound_is_on_each_head_not_on_a_connection() -> None:
    filler = "x: " + "y" * (HEAD_BYTES_MAX // 4)
    async with running() as rig:
        reader, writer = await rig.raw(b"")
        for _ in range(8):
            writer.write(request("POST", CHAT, b"z" * HEAD_BYTES_MAX, filler))
            assert (await reader.readuntil(b'{"ok": true}')).startswith(b"HTTP/1.1 200")
        writer.close()


async def streaming(call: Call) -> None:
    """Begin a stream and go on until the client is gone."""
    await call.stream_head()
    await call.chunk(event("a"))
    await call.gone()


async def test_a_client_that_never_reads_is_let_go() -> None:
    async def flood(call: Call) -> None:
        await call.stream_head()
        while True:
            await call.chunk(event("x" * 65536))

    async with running(timeouts=Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.3)) as rig:
        rig.spec.script = flood
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            deaf.connect(("127.0.0.1", rig.port))
            deaf.sendall(request("POST", CHAT, BODY))
            assert (await rig.record()).error == "the client stopped reading"
            await until(lambda: not rig.server.server_state.connections)


async def test_a_broken_response_that_nobody_reads_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.dataplane.inlet.LINGER_S", 0.1)

    async def fill_and_die(call: Call) -> None:
        (client,) = rig.server.server_state.connections
        await call.stream_head()
        while not client.transport.get_write_buffer_size():
            await call.chunk(event("x" * 4000))
            await asyncio.sleep(0.001)
        call.reset()

    async with running() as rig:
        rig.spec.script = fill_and_die
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            deaf.connect(("127.0.0.1", rig.port))
            deaf.sendall(request("POST", CHAT, BODY))
            assert (await rig.record()).outcome == "upstream_error"
            await until(lambda: not rig.server.server_state.connections)


async def test_pipelined_requests_are_answered_in_their_order_the_routers_own_among_them() -> None:
    async def number(call: Call) -> None:
        await asyncio.sleep(0.01 * (3 - len(rig.spec.calls)))
        await call.reply(b'{"call": %d}' % len(rig.spec.calls))

    async with running() as rig:
        rig.spec.script = number
        wire = b"".join(
            [
                request("POST", CHAT, BODY),
                request("POST", OWN_PATH, b"own one"),
                request("POST", OWN_PATH, b"own two"),
                request("POST", CHAT, BODY),
                request("GET", "/nope"),
                request("POST", CHAT, BODY),
            ]
        )
        reader, writer = await rig.raw(wire)
        for end in (b'"call": 1}', b"own one", b"own two", b'"call": 2}', b"}}", b'"call": 3}'):
            await asyncio.wait_for(reader.readuntil(end), PATIENCE_S)
        await rig.record(4)
        assert [record.status for record in rig.observer.records] == [200, 200, 404, 200]
        writer.close()


async def test_a_long_row_of_requests_that_the_router_answers_itself_needs_no_stack() -> None:
    async def script(call: Call) -> None:
        await go_on.wait()
        await call.reply(b'{"ok": true}')

    go_on = asyncio.Event()
    async with running() as rig:
        rig.spec.script = script
        row = request("GET", "/nope") * (QUEUED_MAX - 1)
        reader, writer = await rig.raw(
            request("POST", CHAT, BODY) + row + request("POST", OWN_PATH, b"mine")
        )
        await until(lambda: rig.spec.calls)
        go_on.set()
        assert (await reader.readuntil(b'{"ok": true}')).startswith(b"HTTP/1.1 200")
        for _ in range(QUEUED_MAX - 1):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
        await asyncio.wait_for(reader.readuntil(b"mine"), PATIENCE_S)
        writer.close()


@pytest.mark.parametrize("lines", [(), OFFER])
async def test_what_waits_behind_a_request_is_bounded(lines: tuple[str, ...]) -> None:
    """However long it goes on: reading stops at the first one, and takes too many for an attack."""

    async def script(call: Call) -> None:
        await asyncio.sleep(0)
        await call.reply(b'{"ok": true}')

    async with running() as rig:
        rig.spec.script = script
        _, writer = await rig.raw(request("GET", "/v1/models", b"", *lines) * 4 * QUEUED_MAX)
        await until(lambda: not rig.busy)
        await rig.settled()
        assert len(rig.spec.calls) < QUEUED_MAX
        writer.close()


async def test_a_few_requests_at_a_time_may_go_on_for_ever() -> None:
    few = QUEUED_MAX // 2
    async with running() as rig:
        reader, writer = await rig.raw(b"")
        for _ in range(4):
            writer.write(request("POST", CHAT, BODY) + request("GET", "/nope") * few)
            assert (await reader.readuntil(b'{"ok": true}')).startswith(b"HTTP/1.1 200")
            for _ in range(few):
                await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
        writer.close()


@pytest.mark.parametrize("path", [CHAT, OWN_PATH, "/nope"])
@pytest.mark.parametrize(
    "last",
    [
        request("POST", CHAT, b"x" * 101),
        request("POST", "/nope", b"x", "expect: 100-continue"),
        request("GET", "/nope", b"", "connection: close"),
    ],
)
async def test_what_comes_behind_the_last_answer_is_no_request(
    last: bytes, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(body_bytes=100) as rig:
        reader, writer = await rig.raw(last + request("POST", path, BODY))
        wire = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert wire.count(b"HTTP/1.1") == 1
        writer.close()
        await until(lambda: not rig.busy)
        await rig.record()
        assert not rig.spec.calls
        assert rig.health["spec"].transport_errors == 0
    assert not caplog.records


@pytest.mark.parametrize("start", [b"2\r\n{}\r\n0\r\nx: ", b"2;x="])
async def test_trailers_and_extensions_without_end_are_not_kept(start: bytes) -> None:
    async with running() as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        _, writer = await rig.raw(head.encode() + start)
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 2**27:
                writer.write(b"y" * 65536)
                await writer.drain()
                sent_bytes += 65536
        assert sent_bytes < 2**27
        await until(lambda: not rig.busy)
        assert (await rig.record()).outcome == "client_disconnect"


async def test_an_offer_of_an_old_client_leaves_it_old() -> None:
    async with running() as rig:
        rig.spec.script = lambda call: call.stream(event("a"), DONE)
        wire = request("POST", CHAT, BODY, *OFFER).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        reader, writer = await rig.raw(wire)
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).endswith(
            b"\r\n\r\n" + event("a") + DONE
        )
        writer.close()


async def test_own_paths_are_asgis_and_leave_no_record() -> None:
    async with running() as rig:
        for _ in range(2):
            assert (await rig.http.post(f"{OWN_PATH}?a=1", content=b"hi")).content == b"hi"
            assert (await rig.http.post(CHAT, content=BODY)).status_code == 200
        assert (await rig.http.get("/%6fwn")).status_code == 404
        await rig.record(3)


async def test_uvicorn_logs_no_access_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as rig:
        await rig.http.post(CHAT, content=BODY)
        await rig.http.post(OWN_PATH, content=BODY)
        await rig.record()
    assert not [line for line in caplog.records if line.name == "uvicorn.access"]


@pytest.mark.parametrize("path", [CHAT, OWN_PATH])
async def test_a_client_that_waits_for_100_continue_is_told_once_it_is_its_turn(path: str) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await call.reply(b'{"ok": true}')

    async with running() as rig:
        rig.spec.script = script
        head = request("POST", path, BODY, "expect: 100-continue").removesuffix(BODY)
        reader, writer = await rig.raw(request("POST", CHAT, BODY) + head)
        await until(lambda: rig.spec.calls)
        go_on.set()
        await reader.readuntil(b'{"ok": true}')
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, b"413"), ("/nope", b"404"), ("/flush_cache", b"100")]
)
async def test_a_client_that_waits_for_100_continue_may_be_refused_instead(
    path: str, status: bytes
) -> None:
    async with running(body_bytes=1000) as rig:
        length = 1001 if path == CHAT else 10
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        reader, writer = await rig.raw(f"{head}content-length: {length}\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_a_client_that_is_still_sending_hears_that_it_is_too_much() -> None:
    """As most clients do: they send all before they read."""
    size = 4 * 2**20
    async with running(body_bytes=1000) as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        reader, writer = await rig.raw(head.encode())
        for _ in range(size // 65536):
            writer.write(b"x" * 65536)
            await writer.drain()
        wire = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert wire.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in wire
        assert wire.endswith(b"}}")
        writer.close()
        await until(lambda: not rig.busy)


async def test_not_all_that_is_too_much_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dataplane.inlet.LINGER_BYTES_MAX", 2**20)
    async with running(body_bytes=1000) as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**40}\r\n\r\n"
        _, writer = await rig.raw(head.encode())
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 2**30:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent_bytes += 65536
        assert sent_bytes < 2**30
        writer.close()
        await until(lambda: not rig.busy)


async def test_a_client_that_closes_its_sending_side_counts_as_gone() -> None:
    async with running() as rig:
        rig.spec.script = streaming
        reader, writer = await rig.post(CHAT, BODY)
        await reader.readuntil(b"\n\n")
        writer.write_eof()
        await until(lambda: rig.spec.calls[0].closed)
        assert (await rig.record()).outcome == "client_disconnect"
        writer.close()


async def test_an_idle_connection_is_closed_and_one_with_a_response_is_not() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        if len(rig.spec.calls) > 1:
            await call.stream_head()
            await call.chunk(event("a"))
            await go_on.wait()
            await call.chunk(DONE)
            await call.end()
        else:
            await call.reply(b'{"ok": true}')

    async with running(idle_client_s=0.1) as rig:
        rig.spec.script = script
        idle, idle_writer = await rig.post(CHAT, BODY)
        assert (await idle.readuntil(b'{"ok": true}')).startswith(b"HTTP/1.1 200")
        reader, writer = await rig.post(CHAT, BODY)
        await reader.readuntil(b"\n\n")
        assert await asyncio.wait_for(idle.read(), PATIENCE_S) == b""
        go_on.set()
        await reader.readuntil(b"0\r\n\r\n")
        for each in (idle_writer, writer):
            each.close()


async def test_a_shutdown_closes_idle_connections_and_lets_a_response_end() -> None:
    go_on = asyncio.Event()
    async with running() as rig:
        rig.spec.script = until_set(go_on)
        idle, idle_writer = await rig.raw(b"")
        reader, writer = await rig.post(CHAT, BODY)
        await reader.readuntil(b"\n\n")
        rig.server.should_exit = True
        assert await asyncio.wait_for(idle.read(), PATIENCE_S) == b""
        go_on.set()
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).endswith(b"0\r\n\r\n")
        assert (await rig.record()).outcome == "ok"
        for each in (idle_writer, writer):
            each.close()


async def test_an_old_client_gets_no_chunks_and_an_end_by_closing() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), DONE)

    async with running() as rig:
        rig.spec.script = script
        wire = request("POST", CHAT, BODY).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        reader, writer = await rig.raw(wire)
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == event("a") + DONE
        writer.close()


async def test_an_old_client_sees_that_its_answer_broke() -> None:
    async def script(call: Call) -> None:
        await call.head(200, "content-type: application/json", "transfer-encoding: chunked")
        await call.chunk(b'{"half":')
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        wire = request("POST", CHAT, BODY).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        reader, writer = await rig.raw(wire)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert (await rig.record()).outcome == "upstream_error"
        writer.close()


async def test_what_is_no_request_does_not_end_up_in_the_response_before_it() -> None:
    async with running() as rig:
        rig.spec.script = streaming
        reader, writer = await rig.post(CHAT, BODY)
        await reader.readuntil(b"\n\n")
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" not in await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert (await rig.record()).outcome == "client_disconnect"
        writer.close()
