"""Room, the queue in front of it, and who is turned away."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from router.core.admission import Limits, Priority, Room
from router.settings import Admission
from tests.integration.rig import (
    ADMIN_KEY,
    BOTH_LOOPS,
    CHAT,
    DONE,
    STREAM,
    Call,
    Engine,
    Rig,
    event,
    running,
    until,
)

pytestmark = [pytest.mark.anyio, BOTH_LOOPS]

BATCH = "x-crossover-priority: batch"
ONE = Admission(Limits(each=Room(sequences=1)))


class Held:
    """An engine's script that answers each request when it is told to, in the order of arrival."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.served: list[str] = []
        self._go: list[asyncio.Event] = []

    async def __call__(self, call: Call) -> None:
        go = asyncio.Event()
        self.calls.append(call)
        self.served.append(call.header("x-request-id") or "")
        self._go.append(go)
        await call.stream_head()
        await call.chunk(event("a"))
        await go.wait()
        await call.chunk(DONE)
        await call.end()

    def end(self, place: int = -1) -> None:
        self._go[place].set()

    async def began(self, count: int) -> None:
        await until(lambda: len(self.calls) == count)


class Client:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def error(self) -> tuple[str, str]:
        """Return head and code of the error that it was answered with."""
        head = await self.head()
        length = int(head.lower().split("content-length: ")[1].split("\r")[0])
        body = json.loads(await self.reader.readexactly(length))
        assert f"x-crossover-error: {body['error']['code']}\r\n" in head
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return head, body["error"]["code"]


class Crowd:
    """The clients of a test."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._clients: list[Client] = []

    async def send(self, name: str, *lines: str, path: str = CHAT, body: bytes = STREAM) -> Client:
        client = Client(*await self._rig.post(path, body, f"x-request-id: {name}", *lines))
        self._clients.append(client)
        return client

    async def wait(self, name: str, *lines: str, path: str = CHAT, body: bytes = STREAM) -> Client:
        """Send it, and see it wait."""
        before = len(self._rig.relay.gate.line)
        client = await self.send(name, *lines, path=path, body=body)
        await until(lambda: len(self._rig.relay.gate.line) == before + 1)
        return client

    def leave(self) -> None:
        for client in self._clients:
            client.writer.close()


@contextlib.asynccontextmanager
async def crowded(
    held: Held, admission: Admission = ONE, **engines: Engine
) -> AsyncIterator[tuple[Rig, Crowd]]:
    """A router whose first request is in flight, before one engine or more."""
    engines = {"spec": Engine(held), **engines}
    async with running(engines=engines, admission=admission) as rig:
        crowd = Crowd(rig)
        try:
            await crowd.send("first")
            await held.began(1)
            yield rig, crowd
            crowd.leave()
            await rig.settled()
        finally:
            crowd.leave()


async def test_who_finds_no_room_waits_and_is_served_when_a_place_is_free() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        second = await crowd.wait("second")
        assert rig.ledger.load("spec").sequences == 1
        held.end(0)
        await held.began(2)
        held.end(1)
        assert (await second.head()).startswith("HTTP/1.1 200")
        record = await rig.record(2)
        assert (record.waited, record.outcome) == ("served", "ok")
        assert record.queue_s is not None
        assert record.duration_s >= record.queue_s > 0
        assert rig.observer.records[0].queue_s is None
        await rig.settled()
        assert rig.ledger.on_room is None


async def test_a_full_server_leaves_the_request_to_the_other() -> None:
    async with crowded(Held(), base=Engine()) as (rig, _):
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.headers["x-crossover-server"] == "base"


async def test_prompts_that_wait_for_a_first_token_take_room_until_it_comes() -> None:
    go_on = asyncio.Event()

    class Slow(Held):
        async def __call__(self, call: Call) -> None:
            if b"xxx" in call.body:
                await go_on.wait()
            await super().__call__(call)

    held = Slow()
    long = json.dumps({"prompt": "x" * 4000, "stream": True}).encode()
    admission = Admission(Limits(each=Room(prefill_tokens=1500)))
    async with crowded(held, admission) as (rig, crowd):
        await crowd.send("a", path="/v1/completions", body=long)
        await until(lambda: rig.ledger.load("spec").prefill_tokens)
        await crowd.wait("b", path="/v1/completions", body=long)
        go_on.set()
        await held.began(3)  # the others still decode
        assert rig.ledger.load("spec").sequences == 3


async def test_interactive_requests_go_first_and_each_class_in_its_order() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        for name, lines in (("b1", [BATCH]), ("i1", []), ("b2", [BATCH]), ("i2", [])):
            await crowd.wait(name, *lines)
        for count in range(2, 6):
            held.end()
            await held.began(count)
        held.end()
        assert held.served == ["first", "i1", "i2", "b1", "b2"]
        assert (await rig.record(5)).priority == "batch"


async def test_a_newcomer_does_not_overtake_who_waits() -> None:
    """A large request waits for two places; a small one that came later would fit into one."""
    held = Held()
    two = json.dumps({"prompt": ["a", "b"], "stream": True}).encode()
    async with crowded(held, Admission(Limits(each=Room(sequences=2)))) as (rig, crowd):
        await crowd.send("another")
        await held.began(2)
        await crowd.wait("large", path="/v1/completions", body=two)
        held.end(0)
        await until(lambda: rig.ledger.load("spec").sequences == 1)
        await crowd.wait("small")
        held.end(1)
        await held.began(3)
        assert held.served[2] == "large"
        held.end(2)
        await held.began(4)


async def test_a_full_queue_is_a_429_with_a_retry_after() -> None:
    admission = Admission(Limits(each=Room(sequences=1)), queue_max=1)
    async with crowded(Held(), admission) as (rig, crowd):
        await crowd.wait("second")
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 429
        assert response.headers["x-crossover-error"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        record = await rig.record()
        assert (record.outcome, record.waited, record.server) == ("rejected", "full", None)


async def test_a_full_queue_sheds_batch_for_interactive() -> None:
    admission = Admission(Limits(each=Room(sequences=1)), queue_max=2)
    async with crowded(Held(), admission) as (rig, crowd):
        await crowd.wait("b1", BATCH)
        b2 = await crowd.wait("b2", BATCH)
        await crowd.send("i1")
        head, code = await b2.error()
        assert head.startswith("HTTP/1.1 429 ")
        assert code == "queue_shed"
        assert [call.record.request_id for call in rig.relay.gate.line.first(9)] == ["i1", "b1"]
        b3 = await crowd.send("b3", BATCH)
        assert (await b3.error())[1] == "queue_full"
        assert [record.waited for record in rig.observer.records] == ["shed", "full"]


async def test_retry_after_is_honest_about_how_long_requests_take() -> None:
    admission = Admission(Limits(each=Room(sequences=1)), queue_max=2)
    async with crowded(Held(), admission) as (rig, crowd):
        for name in ("a", "b"):
            await crowd.wait(name)
        # As if the only sequence of the server had taken 20 s so far.
        rig.ledger._counts["spec"].sequence_s += 20.0
        full = await crowd.send("c")
        head, _ = await full.error()
        seconds = int(head.split("retry-after: ")[1].split("\r")[0])
        assert 60 <= seconds <= 80


async def test_who_waits_too_long_gets_a_429() -> None:
    admission = Admission(Limits(each=Room(sequences=1)), queue_timeout_s=0.1)
    async with crowded(Held(), admission) as (rig, _):
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.status_code == 429
        assert response.headers["x-crossover-error"] == "queue_timeout"
        assert int(response.headers["retry-after"]) >= 1
        assert (await rig.record()).waited == "timeout"


async def test_who_waits_while_all_servers_go_down_gets_a_503() -> None:
    admission = Admission(Limits(each=Room(sequences=1)), queue_timeout_s=0.3)
    async with crowded(Held(), admission) as (rig, crowd):
        waits = await crowd.wait("second")
        for _ in range(2):
            rig.health["spec"].transport_error(monotonic(), "gone")
        head, code = await waits.error()
        assert (head[:12], code) == ("HTTP/1.1 503", "no_server")
        assert "retry-after: " in head


async def test_who_leaves_the_queue_is_dropped_at_once_and_never_sent() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        leaves = await crowd.wait("leaves")
        stays = await crowd.wait("stays")
        leaves.writer.transport.abort()
        record = await rig.record()
        assert (record.outcome, record.waited) == ("client_disconnect", "client_left")
        assert record.status == 499
        assert len(rig.relay.gate.line) == 1
        held.end()
        await held.began(2)
        held.end()
        assert (await stays.head()).startswith("HTTP/1.1 200")
        assert held.served == ["first", "stays"]
        assert not rig.spec.aborts


async def test_a_shutdown_answers_who_waits() -> None:
    async with crowded(Held()) as (rig, crowd):
        waits = await crowd.wait("second")
        rig.server.should_exit = True
        head, code = await waits.error()
        assert (head[:12], code) == ("HTTP/1.1 503", "shutting_down")
        assert len(rig.relay.gate.line) == 0


async def test_a_server_that_comes_up_serves_who_waits() -> None:
    other = Held()
    async with crowded(Held(), base=Engine(other)) as (rig, crowd):
        for _ in range(2):
            rig.health["base"].transport_error(monotonic(), "gone")
        await crowd.wait("second")
        rig.health["base"].probe_ok(1.0)
        await other.began(1)
        other.end()


async def test_raised_limits_serve_who_waits() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        for name in ("a", "b", "c"):
            await crowd.wait(name)
        rig.relay.gate.configure(Admission(Limits(each=Room(sequences=3))))
        await held.began(3)
        assert len(rig.relay.gate.line) == 1
        rig.relay.gate.configure(Admission())
        await held.began(4)


async def test_an_unknown_class_is_a_400_that_names_the_known_ones() -> None:
    async with running() as rig:
        headers = {"x-crossover-priority": "urgent"}
        response = await rig.http.post(CHAT, content=STREAM, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "priority_unknown"
        for priority in Priority:
            assert priority.value in error["message"]
        assert not rig.spec.calls


async def test_the_class_is_not_told_to_the_engine() -> None:
    async with running() as rig:
        for word in ("batch", "interactive"):
            headers = {"x-crossover-priority": word}
            assert (await rig.http.post(CHAT, content=STREAM, headers=headers)).status_code == 200
        assert all(call.header("x-crossover-priority") is None for call in rig.spec.calls)
        assert [record.priority for record in rig.observer.records] == ["batch", "interactive"]


async def test_a_list_of_models_never_waits() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        await crowd.wait("second")
        asked = asyncio.ensure_future(rig.http.get("/v1/models"))
        await held.began(2)
        held.end(1)
        assert (await asked).status_code == 200
        held.end(0)
        await held.began(3)


async def test_a_fault_at_the_head_of_the_queue_does_not_hold_up_those_behind_it() -> None:
    held = Held()
    async with crowded(held) as (rig, crowd):
        bad = await crowd.wait("bad")
        await crowd.wait("good")
        head = rig.relay.gate.line.head()
        assert head is not None
        head.refused = None  # type: ignore[assignment]
        held.end()
        assert (await bad.head()).startswith("HTTP/1.1 500")
        await held.began(2)


async def test_hundreds_that_wait_and_leave_cost_no_lease_and_no_engine() -> None:
    count = 300
    held = Held()
    async with crowded(held) as (rig, crowd):
        clients = [await crowd.send(f"c{number}") for number in range(count)]
        await until(lambda: len(rig.relay.gate.line) == count)
        assert len(rig.ledger) == 1
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: len(rig.relay.gate.line) == 0)
        assert rig.ledger.on_room is None
        held.end()
        await rig.settled()
        assert len(held.calls) == 1


async def test_who_waits_for_one_server_does_not_hold_up_the_others() -> None:
    """Its server is full, or down: what those behind it wait for is another one."""
    held, other = Held(), Held()
    headers = "authorization: Bearer " + ADMIN_KEY
    async with crowded(held, base=Engine(other)) as (rig, crowd):
        await crowd.send("on-base")
        await other.began(1)
        await crowd.wait("only-spec", "x-crossover-target: spec", headers)
        await crowd.wait("any")
        other.end()
        await other.began(2)
        assert other.served == ["on-base", "any"]
        other.end()
        await until(lambda: rig.ledger.load("base").sequences == 0)
        await crowd.send("late")  # the one for spec still waits before it
        await other.began(3)
        assert len(rig.relay.gate.line) == 1
        held.end()
        await held.began(2)
        assert held.served == ["first", "only-spec"]
        other.end()
