"""What clients may send: heads, offers to upgrade, and requests behind one another."""

import asyncio
import socket

import pytest

from router.dataplane.inlet import HEAD_BYTES_MAX
from router.settings import Timeouts
from tests.integration.rig import (
    BOTH_LOOPS,
    CHAT,
    PATIENCE_S,
    Call,
    event,
    request,
    running,
    until,
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


async def test_a_client_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dataplane.inlet.LINGER_S", 0.1)

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
