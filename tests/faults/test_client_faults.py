"""Every fault of a client in every phase of a request, on real sockets.

A client's faults cost no server its name: what it asked for is stopped, and the next is served.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass

import pytest

from router.dataplane import inlet
from router.settings import Timeouts
from tests.faults.test_server_faults import BODIES, everything
from tests.integration.rig import (
    CHAT,
    DONE,
    Call,
    Rig,
    answer,
    event,
    request,
    running,
    until,
)

pytestmark = pytest.mark.anyio

LIMIT_S = 0.2
FAULTS = ("reset", "close", "half-close")
BEFORE = ("before a request", "in its head", "in its body")
DURING = ("in prefill", "between events", "in an event", "after [DONE]")


@dataclass
class Until:
    """An engine's script: an answer up to a phase, and no further."""

    phase: str
    mode: str

    async def __call__(self, call: Call) -> None:
        if self.phase != "in prefill":
            if self.mode == "stream":
                await call.stream_head()
                await call.chunk(event("a"))
            else:
                await call.head(200, "content-type: application/json", "content-length: 1000")
                await call.write(b'{"a"')
        if self.phase == "in an event":
            await call.chunk(b"data: {")
        if self.phase == "after [DONE]":
            await call.chunk(DONE)
        await call.gone()


def leave(writer: asyncio.StreamWriter, fault: str) -> None:
    if fault == "reset":
        writer.transport.abort()
    elif fault == "close":
        writer.close()
    else:
        writer.write_eof()


async def check_next(rig: Rig) -> None:
    """Nothing is left of the client, no server is blamed, and the next is served."""
    await rig.settled()
    for health in rig.health.values():
        assert (health.breaker.failures, health.transport_errors) == (0, 0)
    rig.spec.script = answer
    response = await rig.http.post(CHAT, content=BODIES["plain"])
    assert (response.status_code, response.json()) == (200, {"ok": True})


def begun(phase: str) -> bytes:
    """What a client has sent when it fails before its request is complete."""
    whole = request("POST", CHAT, BODIES["stream"])
    return {"before a request": b"", "in its head": whole[:30], "in its body": whole[:-5]}[phase]


@pytest.mark.parametrize("phase", BEFORE)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_client_that_leaves_before_it_has_asked_reaches_no_engine(
    fault: str, phase: str
) -> None:
    async with running() as rig:
        _, writer = await rig.raw(begun(phase))
        await until(lambda: rig.server.server_state.connections)
        if phase == "in its body":
            await until(lambda: rig.relay.calls)
        leave(writer, fault)
        await until(lambda: not rig.server.server_state.connections)
        assert rig.spec.calls == []
        outcomes = [(each.outcome, each.status) for each in rig.observer.records]
        assert outcomes == ([("client_disconnect", 499)] if phase == "in its body" else [])
        await check_next(rig)
        writer.close()


@pytest.mark.parametrize("phase", BEFORE)
async def test_a_client_that_stands_still_before_it_has_asked_is_let_go(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inlet, "HEAD_S", LIMIT_S)
    timeouts = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=LIMIT_S)
    async with running(timeouts=timeouts, idle_client_s=LIMIT_S) as rig:
        reader, writer = await rig.raw(begun(phase))
        wire = await everything(reader)
        status = {"before a request": b"", "in its head": b"400", "in its body": b"408"}[phase]
        assert wire[9:12] == status
        assert rig.spec.calls == []
        writer.close()
        await check_next(rig)


async def test_a_head_that_stands_still_behind_a_response_does_not_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inlet, "HEAD_S", 0.05)
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await go.wait()
        await call.chunk(DONE)
        await call.end()

    async with running(idle_client_s=LIMIT_S) as rig:
        rig.spec.script = script
        reader, writer = await rig.raw(request("POST", CHAT, BODIES["stream"]) + b"GET /v1")
        await reader.readuntil(event("a"))
        await asyncio.sleep(0.2)
        go.set()
        assert (await everything(reader)).endswith(DONE + b"\r\n0\r\n\r\n")
        assert (await rig.record()).outcome == "ok"
        writer.close()


@pytest.mark.parametrize("mode", BODIES)
async def test_a_client_that_sends_byte_by_byte_is_served(mode: str) -> None:
    async with running() as rig:
        reader, writer = await rig.raw(b"")
        for byte in request("POST", CHAT, BODIES[mode], "connection: close"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert b'{"ok": true}' in await everything(reader)
        assert json.loads(rig.spec.calls[0].body)["messages"] == []
        writer.close()
        await check_next(rig)


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize("phase", DURING)
@pytest.mark.parametrize("fault", [*FAULTS, "garbage"])
async def test_a_client_that_leaves_stops_its_engine(fault: str, phase: str, mode: str) -> None:
    if mode == "plain" and phase in ("in an event", "after [DONE]"):
        phase = "between events"  # no events in it
    async with running() as rig:
        rig.spec.script = Until(phase, mode)
        reader, writer = await rig.post(CHAT, BODIES[mode])
        await until(lambda: rig.spec.calls)
        if phase != "in prefill":
            last = {"in an event": b"data: {\r\n", "after [DONE]": DONE}
            await reader.readuntil(last.get(phase, b'"a"'))
        if fault == "garbage":
            writer.write(b"\x00 what is this\r\n\r\n")
        else:
            leave(writer, fault)
        await until(lambda: rig.spec.calls[0].closed)
        record = await rig.record()
        assert record.outcome == "client_disconnect"
        assert record.server == "spec"
        await until(lambda: rig.spec.aborts)
        await check_next(rig)
        with contextlib.suppress(ConnectionError):
            writer.close()


async def test_a_client_that_reads_byte_by_byte_gets_every_byte() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), event("b"), DONE)

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, BODIES["stream"], "connection: close")
        wire = b""
        while byte := await reader.read(1):
            wire += byte
        assert wire.endswith(DONE + b"\r\n0\r\n\r\n")
        writer.close()
        await check_next(rig)
