"""Slow clients, large bodies, servers that are down: every buffer and wait has a bound."""

import asyncio
import resource
import socket
import tracemalloc
from collections.abc import Callable

import pytest

from router.settings import Timeouts
from tests.integration.rig import (
    BOTH_LOOPS,
    CHAT,
    DONE,
    OWN_PATH,
    STREAM,
    Call,
    Engine,
    Rig,
    event,
    request,
    running,
    until,
    until_set,
)

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]

BIG = event("x" * 65536)
BIG_COUNT = 400


class Flood:
    """An engine's script that writes as fast as it may, and counts."""

    def __init__(self) -> None:
        self.written = 0

    async def __call__(self, call: Call) -> None:
        call.writer.transport.set_write_buffer_limits(high=65536)
        await call.stream_head()
        for _ in range(BIG_COUNT):
            await call.chunk(BIG)
            self.written += 1
        await call.chunk(DONE)
        await call.end()

    async def stuck(self) -> int:
        """Wait until no more can be written; return how much was."""
        before = 0
        while before != self.written or not before:
            before = self.written
            await asyncio.sleep(0.2)
        return before


async def test_a_slow_client_holds_its_engine_back_and_gets_every_byte() -> None:
    flood = Flood()
    async with running() as rig:
        rig.spec.script = flood
        async with rig.http.stream("POST", CHAT, content=STREAM) as response:
            # What is on the way sits in socket buffers; the router holds one read at most.
            assert await flood.stuck() < BIG_COUNT
            assert len(rig.relay.calls) == 1
            body = b"".join([data async for data in response.aiter_raw()])
        assert body == BIG * BIG_COUNT + DONE
        assert (await rig.record()).outcome == "ok"
        await rig.settled()
        # The connection that had been paused serves the next request.
        rig.spec.script = Flood()
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        assert rig.spec.connections == 1


async def test_a_client_that_did_not_read_before_its_turn_holds_its_engine_back_too() -> None:
    flood = Flood()
    async with running() as rig:
        rig.spec.script = flood
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", rig.port))
            deaf.setblocking(False)
            wire = request("POST", OWN_PATH, b"z" * 2**19) + request("POST", CHAT, STREAM)
            await asyncio.get_running_loop().sock_sendall(deaf, wire)
            assert await flood.stuck() < BIG_COUNT


async def test_a_slow_client_is_not_taken_for_a_slow_engine() -> None:
    flood = Flood()
    timeouts = Timeouts(connect_s=1.0, first_byte_s=0.3, idle_s=3.0)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = flood
        async with rig.http.stream("POST", CHAT, content=STREAM) as response:
            await flood.stuck()
            await response.aread()
        assert (await rig.record()).outcome == "ok"


async def test_a_client_that_stops_reading_for_good_is_given_up() -> None:
    flood = Flood()
    timeouts = Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.2)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = flood
        async with rig.http.stream("POST", CHAT, content=STREAM):
            record = await rig.record()
            assert (record.outcome, record.error) == (
                "client_disconnect",
                "the client stopped reading",
            )
            await until(lambda: rig.spec.open_connections == 0 or rig.spec.aborts)
            await rig.settled()
            assert rig.relay.attempts.aborter.pending in (0, 1)


async def test_giving_up_a_client_leaves_the_next_request_on_its_connection_alone() -> None:
    async def whole(call: Call) -> None:
        """Fill the way to the client to just below the mark, then exceed it and end in one."""
        (client,) = rig.server.server_state.connections
        await call.stream_head()
        while client.transport.get_write_buffer_size() < 60_000:
            await call.chunk(event("x" * 4000))
            await asyncio.sleep(0.001)
        last = event("x" * 8000) + DONE
        await call.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))

    async def until_the_first_is_given_up(call: Call) -> None:
        await call.stream_head()
        while not rig.observer.records:
            await call.chunk(event("a"))
            await asyncio.sleep(0.01)
        await call.chunk(event("b"))
        await call.chunk(DONE)
        await call.end()

    timeouts = Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.5)
    with socket.socket() as deaf:  # left open by a failure, it would hold up the loop's end
        async with running(timeouts=timeouts) as rig:
            rig.spec.script = whole
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            deaf.connect(("127.0.0.1", rig.port))
            deaf.sendall(request("POST", CHAT, STREAM))
            await until(lambda: rig.pools["spec"].idle_connections)
            rig.spec.script = until_the_first_is_given_up
            second = await rig.http.post(CHAT, content=STREAM)
            assert second.content.endswith(event("b") + DONE)
            assert rig.spec.connections == 1
            given_up, served = rig.observer.records
            assert (given_up.outcome, given_up.error) == (
                "client_disconnect",
                "the client stopped reading",
            )
            assert served.outcome == "ok"
            deaf.close()
            await rig.settled()


async def test_a_client_that_leaves_while_it_is_slow_stops_the_engine() -> None:
    flood = Flood()
    async with running() as rig:
        rig.spec.script = flood
        _, writer = await rig.post(CHAT, STREAM)
        await flood.stuck()
        writer.transport.abort()
        assert (await rig.record()).outcome == "client_disconnect"
        await until(lambda: len(rig.spec.aborts) == 1)
        assert flood.written < BIG_COUNT
        await rig.settled()


async def test_an_engine_that_dies_under_a_slow_client_still_ends_in_an_error() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        for _ in range(BIG_COUNT):
            await asyncio.wait_for(call.chunk(BIG), 0.2)

    async def fragile(call: Call) -> None:
        call.writer.transport.set_write_buffer_limits(high=65536)
        try:
            await script(call)
        except TimeoutError:
            call.reset()

    async with running() as rig:
        rig.spec.script = fragile
        reader, writer = await rig.post(CHAT, STREAM)
        await until(lambda: rig.spec.calls and rig.spec.calls[0].closed)
        wire = await reader.read()
        assert b'data: {"error":' in wire[-1000:]
        assert not wire.endswith(b"0\r\n\r\n")
        assert (await rig.record()).outcome == "upstream_error"
        writer.close()
        await rig.settled()


async def test_a_declared_body_over_the_limit_is_refused_unread() -> None:
    async with running(body_bytes=1000) as rig:
        reader, writer = await rig.raw(
            b"POST %s HTTP/1.1\r\nhost: r\r\ncontent-length: 1001\r\n\r\n" % CHAT.encode()
        )
        wire = await reader.read()
        assert wire.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in wire
        assert rig.spec.calls == []
        record = await rig.record()
        assert (record.outcome, record.status) == ("rejected", 413)
        writer.close()


async def test_a_chunked_body_over_the_limit_is_refused_as_it_comes() -> None:
    async with running(body_bytes=1000) as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        reader, writer = await rig.raw(head + b"1f4\r\n" + b"a" * 500 + b"\r\n")
        writer.write(b"1f5\r\n" + b"a" * 501 + b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()


@pytest.mark.parametrize("begun", [b"", b'{"messages":'])
async def test_a_body_that_does_not_come_is_not_waited_for(begun: bytes) -> None:
    timeouts = Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.2)
    async with running(timeouts=timeouts) as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        reader, writer = await rig.raw(head.encode() + begun)
        wire = await reader.read()
        assert wire.startswith(b"HTTP/1.1 408")
        assert b"x-crossover-error: body_stalled" in wire
        assert not rig.spec.calls
        assert (await rig.record()).outcome == "rejected"
        writer.close()


async def test_a_body_in_very_small_chunks_takes_no_more_memory_than_its_bytes() -> None:
    count = 100_000
    async with running() as rig:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await rig.raw(head.encode())
        tracemalloc.start()
        try:
            writer.write(b"2\r\nab\r\n" * count)
            await writer.drain()
            await until(lambda: writer.transport.get_write_buffer_size() == 0)
            writer.write(b"1\r\nc\r\n0\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            # The wire's bytes and those of the body, in some copies; 40 bytes a chunk if kept.
            assert tracemalloc.get_traced_memory()[1] < 3_000_000
        finally:
            tracemalloc.stop()
        assert rig.spec.calls[0].body == b"ab" * count + b"c"
        writer.close()


async def test_a_body_of_just_the_limit_passes() -> None:
    body = b'{"prompt": "' + b"a" * 986 + b'"}'
    async with running(body_bytes=1000) as rig:
        assert len(body) == 1000
        assert (await rig.http.post("/v1/completions", content=body)).status_code == 200


async def test_a_refused_connection_sends_the_request_to_the_other_server() -> None:
    async with running() as rig:
        await rig.spec.stop()
        for _ in range(3):
            response = await rig.http.post(CHAT, content=STREAM)
            assert response.status_code == 200
            assert response.headers["x-crossover-server"] == "base"
        assert [record.attempts for record in rig.observer.records] == [2, 2, 1]
        assert not rig.health["spec"].up
        assert (await rig.record(3)).server == "base"
        await rig.settled()


async def test_a_router_out_of_files_blames_no_server() -> None:
    async with running() as rig:
        reader, writer = await rig.raw(b"")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        await until(lambda: rig.server.server_state.connections)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            for _ in range(4):
                writer.write(request("POST", CHAT, STREAM))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1" in head
                assert b"x-crossover-error: exhausted" in head
                await reader.readuntil(b"}}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert rig.observer.outcomes == {"rejected": 4}
        assert all(health.up for health in rig.health.values())
        writer.write(request("POST", CHAT, STREAM))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_server_that_is_given_up_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as rig:
        await rig.spec.stop()
        for _ in range(3):
            assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        told = [line for line in caplog.messages if line.startswith("server spec is unreachable")]
        assert len(told) == 1


async def test_all_connections_refused_is_a_502() -> None:
    async with running() as rig:
        await rig.spec.stop()
        await rig.base.stop()
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 502
        assert response.headers["x-crossover-error"] == "upstream_unreachable"
        record = await rig.record()
        assert (record.outcome, record.attempts) == ("upstream_error", 2)
        await rig.settled()


async def test_no_server_up_is_a_503_with_retry_after() -> None:
    async with running() as rig:
        for health in rig.health.values():
            health.transport_error(0.0, "gone")
            health.transport_error(0.0, "gone")
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-crossover-error"] == "no_server"
        assert response.json()["error"]["type"] == "overloaded_error"
        record = await rig.record()
        assert (record.outcome, record.attempts) == ("rejected", 0)


async def test_a_connection_that_is_never_accepted_goes_to_the_other_server() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(deaf.getsockname())
        engine = Engine()
        engine.url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        timeouts = Timeouts(connect_s=0.1, first_byte_s=30.0, idle_s=30.0)
        async with running(engines={"spec": engine, "base": Engine()}, timeouts=timeouts) as rig:
            response = await rig.http.post(CHAT, content=STREAM)
            assert response.headers["x-crossover-server"] == "base"
            assert rig.health["spec"].last_error == "no connection within 0.1 s"
        for sock in fill:
            sock.close()


async def test_a_server_killed_in_mid_stream_leaves_the_next_request_to_the_other() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await reader.readuntil(b"\n\n")
        await rig.spec.stop()
        assert b'data: {"error":' in await reader.read()
        writer.close()
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.headers["x-crossover-server"] == "base"
        await rig.settled()


async def test_three_hundred_streams_run_at_once() -> None:
    """More than the connection limits that HTTP clients come with."""
    count = 300
    go_on = asyncio.Event()
    async with running() as rig:
        rig.spec.script = until_set(go_on)
        pairs = [await rig.post(CHAT, STREAM) for _ in range(count)]
        for reader, _ in pairs:
            await reader.readuntil(b"\n\n")
        assert rig.ledger.load("spec").decode_sequences == count
        go_on.set()
        for reader, writer in pairs:
            await reader.readuntil(b"0\r\n\r\n")
            writer.close()
        assert (await rig.record(count)).outcome == "ok"
        await rig.settled()
        assert rig.pools["spec"].idle_connections <= count


async def test_a_shutdown_in_mid_stream_gives_every_lease_back() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await reader.readuntil(b"\n\n")
        ledger = rig.ledger
        rig.server.should_exit = True
        await rig.record()
        assert len(ledger) == 0
        assert rig.observer.records[0].outcome == "truncated"
        await until(lambda: len(rig.spec.aborts) == 1)
        writer.close()


async def test_a_request_in_prefill_at_the_shutdown_may_be_sent_again() -> None:
    async def script(call: Call) -> None:
        await call.gone()

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        await until(lambda: rig.spec.calls)
        rig.server.should_exit = True
        wire = await reader.read()
        assert wire.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in wire
        assert b'"code":"shutting_down"' in wire
        assert (await rig.record()).status == 503
        assert len(rig.ledger) == 0
        writer.close()


def spoil_the_health(rig: Rig) -> None:
    rig.health["spec"].context_length = "broken"  # type: ignore[assignment]


def spoil_the_pool(rig: Rig) -> None:
    rig.pools["spec"].host = "broken"  # type: ignore[assignment]


@pytest.mark.parametrize("spoil", [spoil_the_health, spoil_the_pool])
@pytest.mark.parametrize("connected", [False, True])
async def test_a_fault_of_the_router_is_a_500_without_details(
    spoil: Callable[[Rig], None], connected: bool
) -> None:
    async with running() as rig:
        if connected:
            await rig.http.post(CHAT, content=STREAM)
        spoil(rig)
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal"
        assert "Traceback" not in response.text
        assert (await rig.record(1 + connected)).status == 500
        await rig.settled()


async def test_small_writes_are_not_delayed_on_the_way_to_an_engine() -> None:
    async with running() as rig:
        connection = await rig.pools["spec"].connection()
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        connection.abort()
