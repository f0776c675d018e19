"""Every fault of a server in every phase of an answer, streamed and plain, on real sockets.

Of each: the client gets the right answer and never a clean end of half of one; the record and the
breaker say whose fault it was; the lease is back; and the next request is served.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from router.dataplane.upstream import Connection
from router.settings import Timeouts
from tests.faults.doomed import Doomed
from tests.integration.rig import CHAT, DONE, Call, Engine, Rig, answer, event, running

pytestmark = pytest.mark.anyio

LIMIT_S = 0.2
TIMEOUTS = Timeouts(connect_s=LIMIT_S, first_byte_s=LIMIT_S, idle_s=LIMIT_S)
PATIENT = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=5.0)

BODIES = {
    "stream": json.dumps({"messages": [], "stream": True}).encode(),
    "plain": json.dumps({"messages": []}).encode(),
}
HEADS = {
    mode: b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    for mode, kind in (("stream", b"text/event-stream"), ("plain", b"application/json"))
}
PHASES = ("before head", "after head", "within an event", "between events", "after [DONE]")
FAULTS = ("reset", "close", "stall", "garbage", "truncated chunk", "oversized", "byte by byte")
# There is no chunk before there is a head, and nothing is between the events of a plain body.
IMPOSSIBLE = {("before head", "truncated chunk", mode) for mode in BODIES} | {
    (phase, fault, "plain")
    for phase in ("between events", "after [DONE]")
    for fault in (*FAULTS, "kill -9")
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = {
    "stream": [chunk(event("a")), chunk(event("b")), chunk(DONE), b"0\r\n\r\n"],
    "plain": [chunk(b'{"a": 1,'), chunk(b' "b": 2}'), b"0\r\n\r\n"],
}


def beginning(phase: str, mode: str) -> bytes:
    """What a server has sent when a phase begins."""
    head, parts = HEADS[mode], WHOLE[mode]
    return {
        "before head": b"",
        "after head": head,
        "within an event": head + parts[0] + chunk(event("b")[:20]),
        "between events": head + b"".join(parts[:2]),
        "after [DONE]": head + b"".join(parts[:3]),
    }[phase]


def rest(phase: str, mode: str) -> bytes:
    """What would make the answer whole."""
    if phase == "within an event":
        if mode == "plain":
            return chunk(b' "b": 2}') + b"0\r\n\r\n"
        return chunk(event("b")[20:]) + chunk(DONE) + b"0\r\n\r\n"
    whole = HEADS[mode] + b"".join(WHOLE[mode])
    return whole.removeprefix(beginning(phase, mode))


@dataclass
class Failing:
    """An engine's script: the beginning of an answer, then a fault."""

    phase: str
    fault: str
    mode: str

    async def __call__(self, call: Call) -> None:
        await call.write(beginning(self.phase, self.mode))
        before_head = self.phase == "before head"
        match self.fault:
            case "reset":
                call.reset()
            case "close":
                call.closed = True
                call.writer.close()
            case "stall":
                await call.gone()
            case "garbage":
                await call.write(b"\x00\xff what\r\n\r\n" if before_head else b"zz\r\n")
                await call.gone()
            case "truncated chunk":
                await call.write(b"40\r\nonly this")
                call.closed = True
                call.writer.close()
            case "oversized":
                start = b"HTTP/1.1 200 OK\r\nx: " if before_head else b"0\r\nx: "
                with contextlib.suppress(ConnectionError):
                    for data in (start, *[b"y" * 65536] * 20):
                        await call.write(data)
                await call.gone()
            case "byte by byte":
                for byte in rest(self.phase, self.mode):
                    await call.write(bytes([byte]))
                    await asyncio.sleep(0)


@dataclass(frozen=True)
class Expected:
    """`status` is what the client gets; `code` of the error, in a head or, if `broken`, an event.

    `failures` is what the breaker holds against the server.
    """

    status: int = 200
    code: str | None = None
    outcome: str = "ok"
    failures: int = 0
    broken: bool = False


def expected(phase: str, fault: str, mode: str) -> Expected:
    if fault == "byte by byte":
        return Expected()
    stalled = fault == "stall"
    if (
        phase == "after [DONE]" and fault != "truncated chunk"
    ):  # it is whole, and the connection's end is the server's fault
        return Expected(failures=0 if stalled else 1)
    sent = phase not in ("before head", "after head") or (phase, mode) == ("after head", "plain")
    if not sent:
        if stalled:
            return Expected(504, "first_byte_timeout", "timeout")
        return Expected(502, "upstream_broken", "upstream_error", 1)
    code = ("idle_timeout" if stalled else "upstream_broken") if mode == "stream" else None
    outcome = "timeout" if stalled else "upstream_error"
    return Expected(200, code, outcome, 0 if stalled else 1, broken=True)


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, in whatever way."""
    wire = bytearray()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while data := await reader.read(65536):
                wire += data
    return bytes(wire)


async def asked(rig: Rig, mode: str) -> bytes:
    reader, writer = await rig.post(CHAT, BODIES[mode], "connection: close")
    wire = await everything(reader)
    writer.close()
    return wire


def check_wire(wire: bytes, mode: str, want: Expected) -> None:
    head, _, body = wire.partition(b"\r\n\r\n")
    assert int(head[9:12]) == want.status
    if want.status >= 400:
        assert want.code is not None
        assert f"x-crossover-error: {want.code}".encode() in head
        assert json.loads(body)["error"]["code"] == want.code
        return
    assert body.endswith(b"0\r\n\r\n") is not want.broken
    if want.broken:
        assert not body.endswith(DONE + b"\r\n")
    if want.code is not None:
        assert body.count(b'data: {"error"') == 1
        # The event that was open is ended before the error's begins.
        assert b'\n\ndata: {"error"' in unchunked(body)
        assert f'"code":"{want.code}"'.encode() in body
    if not want.broken:
        assert (b"[DONE]" if mode == "stream" else b' "b": 2}') in unchunked(body)


def unchunked(body: bytes) -> bytes:
    return b"".join(chunks(body))


def chunks(body: bytes) -> Iterator[bytes]:
    while body:  # of one that is broken, up to there
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]


async def check_after(rig: Rig, want: Expected) -> None:
    """What is known of the request, and that nothing of it is left."""
    record = await rig.record()
    assert record.outcome == want.outcome
    assert (record.error is None) is (want.outcome == "ok")
    assert record.server == "spec"
    assert rig.health["spec"].breaker.failures == want.failures
    assert rig.health["base"].breaker.failures == 0
    assert rig.health["spec"].transport_errors == 0
    assert rig.base.calls == []
    await rig.settled()
    if isinstance(rig.spec, Doomed):
        return
    if want.outcome == "timeout":  # an engine that lives is told to stop
        async with asyncio.timeout(5):
            while not rig.spec.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    rig.spec.script = answer
    response = await rig.http.post(CHAT, content=BODIES["plain"])
    assert (response.status_code, response.json()) == (200, {"ok": True})


CELLS = [
    pytest.param(phase, fault, mode, id=f"{phase}, {fault}, {mode}")
    for phase in PHASES
    for fault in FAULTS
    for mode in BODIES
    if (phase, fault, mode) not in IMPOSSIBLE
]


@pytest.mark.parametrize(("phase", "fault", "mode"), CELLS)
async def test_a_fault_of_a_server_in_its_answer(phase: str, fault: str, mode: str) -> None:
    async with running(timeouts=TIMEOUTS if fault == "stall" else PATIENT) as rig:
        rig.spec.script = Failing(phase, fault, mode)
        want = expected(phase, fault, mode)
        check_wire(await asked(rig, mode), mode, want)
        await check_after(rig, want)


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_server_that_is_killed_in_its_answer(phase: str, mode: str) -> None:
    if (phase, "kill -9", mode) in IMPOSSIBLE:
        phase = "within an event"
    doomed = Doomed(beginning(phase, mode))
    async with running(engines={"spec": doomed, "base": Engine()}, timeouts=PATIENT) as rig:
        reader, writer = await rig.post(CHAT, BODIES[mode], "connection: close")
        await doomed.kill(once_written=True)
        want = expected(phase, "kill -9", mode)
        check_wire(await everything(reader), mode, want)
        writer.close()
        await check_after(rig, want)
        response = await rig.http.post(CHAT, content=BODIES["plain"])
        assert response.headers["x-crossover-server"] == "base"


class Unaccepting(Engine):
    """Fails before it has read a request, the first time that somebody connects."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        if number > 1:
            await super()._serve(reader, writer, number)
            return
        await reader.read(1)  # before, nothing is sent on it, and the request may go elsewhere
        if self._fault == "reset":
            writer.transport.abort()
        elif self._fault == "garbage":
            writer.write(b"220 smtp.example ready\r\n")
        with contextlib.suppress(ConnectionError):
            if self._fault == "close":
                writer.close()
            elif self._fault in ("stall", "garbage"):
                await reader.read()
        writer.close()


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize("fault", ["reset", "close", "stall", "garbage"])
async def test_a_fault_of_a_server_that_takes_a_connection_and_no_request(
    fault: str, mode: str
) -> None:
    """Whether it has read the request nobody knows: it is not sent again."""
    engines = {"spec": Unaccepting(fault), "base": Engine()}
    async with running(engines=engines, timeouts=TIMEOUTS) as rig:
        wire = await asked(rig, mode)
        want = expected("before head", fault, mode)
        check_wire(wire, mode, want)
        await check_after(rig, want)


async def test_a_connection_that_is_lost_before_anything_is_sent_on_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as rig:
        pool = rig.pools["spec"]
        connect = pool.connect

        async def lost() -> Connection:
            connection = await connect()
            connection.abort()
            return connection

        monkeypatch.setattr(pool, "connect", lost)
        response = await rig.http.post(CHAT, content=BODIES["plain"])
        assert response.headers["x-crossover-server"] == "base"
        record = await rig.record()
        assert (record.outcome, record.retry) == ("ok", "connect")
        assert rig.health["spec"].transport_errors == 1
        await rig.settled()


class Killed(Doomed):
    """Is not started again with the others."""

    def __init__(self) -> None:
        super().__init__(b"")

    async def start(self) -> None:
        pass


@contextlib.asynccontextmanager
async def unreachable(how: str) -> AsyncIterator[dict[str, Engine]]:
    """Engines of which `spec` refuses connections, or leaves them in the kernel's hands."""
    if how == "kill -9":
        killed = Killed()
        await Doomed.start(killed)
        await killed.kill(once_written=False)
        yield {"spec": killed, "base": Engine()}
        return
    spec = Engine()
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        spec.url = f"http://127.0.0.1:{full.getsockname()[1]}"
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield {"spec": spec, "base": Engine()}


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize("how", ["stall", "kill -9"])
async def test_a_server_that_takes_no_connection_leaves_the_request_to_the_other(
    how: str, mode: str
) -> None:
    async with unreachable(how) as engines, running(engines=engines, timeouts=TIMEOUTS) as rig:
        response = await rig.http.post(CHAT, content=BODIES[mode])
        assert response.status_code == 200
        assert response.headers["x-crossover-server"] == "base"
        record = await rig.record()
        assert (record.outcome, record.retry, record.attempts) == ("ok", "connect", 2)
        assert rig.health["spec"].transport_errors == 1
        assert rig.health["base"].transport_errors == 0
        assert rig.health["spec"].breaker.failures == 0
        await rig.settled()
