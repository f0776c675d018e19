"""The relay with TLS on either side: everything that holds for plain sockets holds here."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.settings import Access, Timeouts
from router.tls import ClientTls, ServerTls
from tests.certificates import Authority, authority
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
)
from tests.integration.test_relay_pressure import BIG, BIG_COUNT, Flood

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(ca: Authority) -> str:
    return ca.pair("127.0.0.1")


@asynccontextmanager
async def listening(ca: Authority, pair: str, **more: Any) -> AsyncIterator[Rig]:
    """A router that listens with TLS, and clients that trust it."""
    verify = ssl.create_default_context(cafile=ca.ca_file)
    async with running(tls=ServerTls(pair), verify=verify, **more) as rig:
        yield rig


def engine(pair: str, ca_file: str | None = None) -> Engine:
    """An engine behind TLS; with `ca_file`, it wants a certificate of its client."""
    context = ServerTls(pair).context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return Engine(tls=context)


async def two_events(call: Call) -> None:
    await call.stream(event("a"), event("b"), DONE)


async def test_streams_and_own_paths_are_served_over_tls(ca: Authority, pair: str) -> None:
    async with listening(ca, pair) as rig:
        rig.spec.script = two_events
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.content == event("a") + event("b") + DONE
        assert (await rig.http.post(OWN_PATH, content=b"x")).content == b"x"
        again = await rig.http.post(CHAT, content=STREAM)
        assert again.status_code == 200
        await rig.record(2)
        await rig.settled()


async def test_a_plain_request_to_a_tls_port_ends_without_harm(ca: Authority, pair: str) -> None:
    async with listening(ca, pair) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(request("GET", "/v1/models"))
        assert b"HTTP" not in await reader.read()
        writer.close()
        assert (await rig.http.get("/v1/models")).status_code == 200


async def test_a_slow_tls_client_holds_its_engine_back_and_gets_every_byte(
    ca: Authority, pair: str
) -> None:
    flood = Flood()
    async with listening(ca, pair) as rig:
        rig.spec.script = flood
        async with rig.http.stream("POST", CHAT, content=STREAM) as response:
            assert await flood.stuck() < BIG_COUNT
            body = b"".join([data async for data in response.aiter_raw()])
        assert body == BIG * BIG_COUNT + DONE
        assert (await rig.record()).outcome == "ok"
        await rig.settled()


async def test_a_slow_client_holds_back_a_tls_engine(ca: Authority, pair: str) -> None:
    flood = Flood()
    access = {"spec": Access(tls=ClientTls(ca.ca_file))}
    async with running(engines={"spec": engine(pair)}, access=access) as rig:
        rig.spec.script = flood
        async with rig.http.stream("POST", CHAT, content=STREAM) as response:
            assert await flood.stuck() < BIG_COUNT
            body = b"".join([data async for data in response.aiter_raw()])
        assert body == BIG * BIG_COUNT + DONE
        await rig.settled()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_tls_client_that_leaves_in_prefill_stops_the_engine(
    ca: Authority, pair: str, how: str
) -> None:
    async with listening(ca, pair) as rig:
        rig.spec.script = Call.gone
        _, writer = await rig.post(CHAT, STREAM)
        await until(lambda: rig.spec.calls)
        if how == "close":
            writer.close()
        else:
            writer.transport.abort()
        await until(lambda: rig.spec.calls[0].closed)
        assert (await rig.record()).outcome == "client_disconnect"
        await until(lambda: rig.spec.aborts)
        await rig.settled()


async def test_a_tls_client_that_reads_no_more_is_reset(ca: Authority, pair: str) -> None:
    flood = Flood()
    timeouts = Timeouts(connect_s=2.0, first_byte_s=30.0, idle_s=0.2)
    async with listening(ca, pair, timeouts=timeouts) as rig:
        rig.spec.script = flood
        context = ssl.create_default_context(cafile=ca.ca_file)
        with (
            socket.create_connection(("127.0.0.1", rig.port)) as raw,
            socket.socket(fileno=os.dup(raw.fileno())) as wire,
        ):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            with await asyncio.to_thread(
                context.wrap_socket, raw, server_hostname="127.0.0.1"
            ) as deaf:
                await asyncio.to_thread(deaf.sendall, request("POST", CHAT, STREAM))
                assert (await rig.record()).error == "the client stopped reading"
                with pytest.raises(ConnectionResetError):
                    await asyncio.to_thread(read_all, wire)
        await rig.settled()


def read_all(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


async def test_an_engine_that_breaks_off_breaks_a_tls_clients_stream(
    ca: Authority, pair: str
) -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        call.reset()

    async with listening(ca, pair) as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, STREAM)
        answer = await reader.read()
        assert b"upstream_truncated" in answer or b"upstream_broken" in answer
        assert not answer.endswith(b"0\r\n\r\n")
        writer.close()
        await rig.settled()


async def test_a_tls_engine_serves_on_one_connection(ca: Authority, pair: str) -> None:
    access = {"spec": Access(tls=ClientTls(ca.ca_file))}
    async with running(engines={"spec": engine(pair)}, access=access) as rig:
        rig.spec.script = two_events
        for _ in range(3):
            assert (await rig.http.post(CHAT, content=STREAM)).content.endswith(DONE)
        assert rig.spec.connections == 1
        await rig.settled()


@pytest.mark.parametrize("wrong", ["name", "authority"])
async def test_a_server_that_cannot_prove_itself_gets_no_request(
    ca: Authority, pair: str, tmp_path: Path, wrong: str
) -> None:
    shown = ca.pair("other.example") if wrong == "name" else authority(tmp_path).pair("127.0.0.1")
    access = {"spec": Access("engine-key", tls=ClientTls(ca.ca_file))}
    async with running(engines={"spec": engine(shown)}, access=access) as rig:
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 502
        assert response.headers["x-crossover-error"] == "upstream_unreachable"
        assert rig.spec.calls == []
        error = (await rig.record()).error
        assert error is not None
        assert "certificate verify failed" in error
        await rig.settled()


async def test_whoever_answers_is_taken_if_nobody_is_to_be_verified(
    ca: Authority, tmp_path: Path
) -> None:
    shown = authority(tmp_path).pair("other.example")
    access = {"spec": Access(tls=ClientTls(verify=False))}
    async with running(engines={"spec": engine(shown)}, access=access) as rig:
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200


@pytest.mark.parametrize("shows", [True, False])
async def test_a_server_may_want_the_routers_certificate(
    ca: Authority, pair: str, shows: bool
) -> None:
    tls = ClientTls(ca.ca_file, ca.pair("router") if shows else None)
    engines = {"spec": engine(pair, ca.ca_file)}
    async with running(engines=engines, access={"spec": Access(tls=tls)}) as rig:
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == (200 if shows else 502)
        await rig.settled()


async def test_what_a_tls_engine_refused_unread_is_not_followed_by_another_request(
    ca: Authority, pair: str
) -> None:
    """What of a body is still to be sent cannot be seen below TLS: the connection is not kept."""

    class Refusing(Engine):
        async def _read(self, reader: Any, writer: Any, number: int) -> Call | None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"POST /v1/tokenize" in head:
                return Call(reader, writer, number, "POST", "/v1/tokenize", [], b"")
            return Call(reader, writer, number, "GET", "/v1/models", [], b"")

    answered = asyncio.Event()

    async def script(call: Call) -> None:
        if call.method == "POST":
            await call.reply(b"{}", 400)
            await answered.wait()
            call.reset()
        else:
            await call.reply(b"{}")

    access = {"spec": Access(tls=ClientTls(ca.ca_file))}
    engines: dict[str, Engine] = {"spec": Refusing(script, ServerTls(pair).context())}
    async with running(engines=engines, access=access, body_bytes=1 << 25) as rig:
        refused = await rig.http.post("/v1/tokenize", content=b"x" * (1 << 24))
        assert refused.status_code == 400
        assert rig.pools["spec"].idle_connections == 0
        assert (await rig.http.get("/v1/models")).status_code == 200
        answered.set()
        await rig.settled()
