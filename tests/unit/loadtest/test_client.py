"""The client against a scripted server on a real socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from loadtest.client import FAILURES_IN_A_ROW_MAX, LoadClient, pool_of
from loadtest.load import Load
from loadtest.pacing import ClosedLoop, OpenLoop, Pacer, Ramp
from loadtest.record import Ending, RunResult
from loadtest.runner import run_load
from loadtest.target import Target
from loadtest.workload import Fixed, Workload

pytestmark = pytest.mark.anyio

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"x-crossover-server: spec\r\nX-Crossover-Reason: split\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def text(word: str) -> bytes:
    return chunk(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % word.encode())


USAGE = chunk(b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\n')
DONE = chunk(b"data: [DONE]\n\n")
LAST = chunk(b"")
WHOLE = HEAD + text("a") + text("b") + USAGE + DONE + LAST

Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Upstream:
    """A server that answers each request by script, and remembers what it was sent."""

    reply: Reply
    url: str = ""
    connections: int = 0
    open_now: int = 0
    most_at_once: int = 0
    in_flight: int = 0
    requests: list[tuple[bytes, dict[str, object]]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_now += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.requests.append((head, body))
                self.in_flight += 1
                self.most_at_once = max(self.most_at_once, self.in_flight)
                await self.reply(reader, writer)
                self.in_flight -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.open_now -= 1
            async with self.changed:
                self.changed.notify_all()

    async def all_closed(self) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: self.open_now == 0)


@asynccontextmanager
async def upstream(reply: Reply) -> AsyncIterator[Upstream]:
    server = Upstream(reply)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await asyncio.wait_for(server.all_closed(), 5)


def raw(data: bytes, *, close: bool = False) -> Reply:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return reply


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a head and a token, then nothing until the client leaves."""
    writer.write(HEAD + text("a"))
    await writer.drain()
    await asyncio.wait_for(reader.read(), 5)


async def load(
    url: str, pacer: Pacer, *, api_key: str | None = None, **options: float
) -> RunResult:
    workload = Workload("m", Fixed(8, 4), seed=1)
    target = Target.parse(url, "/v1/chat/completions", api_key)
    return await run_load(Load((target,), workload, pacer, **options))


def client_of(url: str, pacer: Pacer) -> LoadClient:
    target = Target.parse(url, "/v1/chat/completions")
    load = Load((target,), Workload("m", Fixed(8, 4), seed=1), pacer)
    return LoadClient(load, (pool_of(target),))


def closed(level: int, requests: int) -> ClosedLoop:
    return ClosedLoop(Ramp(((0, level),)), requests=requests)


async def test_a_row_has_the_answer_s_tokens_events_and_server() -> None:
    async with upstream(raw(WHOLE)) as server:
        result = await load(server.url, closed(1, 1))
    (row,) = result.rows
    assert row.ending is Ending.OK
    assert (row.tokens, row.prompt_tokens, row.events, len(row.gaps_s)) == (4, 5, 2, 1)
    assert (row.status, row.server, row.reason) == (200, "spec", "split")
    assert row.first_s is not None
    assert row.last_s is not None
    assert row.end_s is not None
    assert row.intended_s <= row.sent_s <= row.first_s <= row.last_s <= row.end_s
    assert row.body_bytes > 100


async def test_a_closed_loop_keeps_its_level_on_as_many_connections() -> None:
    gate = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.in_flight == 4:
            gate.set()
        await asyncio.wait_for(gate.wait(), 5)
        writer.write(WHOLE)

    async with upstream(reply) as server:
        result = await load(server.url, closed(4, 40))
    assert [row.ending for row in result.rows] == [Ending.OK] * 40
    assert server.most_at_once == 4
    assert server.connections == 4


async def test_the_level_follows_the_ramp() -> None:
    levels: list[int] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        levels.append(server.in_flight)
        writer.write(WHOLE)

    class Steps:
        """One at a time for ten requests, then five at once."""

        def due(self, elapsed_s: float, started: int, in_flight: int) -> tuple[float, ...]:
            level = 1 if started < 10 else 5
            return (elapsed_s,) * min(level - in_flight, 30 - started)

        def next_s(self, started: int) -> None:
            return None

        def over(self, elapsed_s: float, started: int) -> bool:
            return started >= 30

        def share(self, index: int, count: int) -> "Steps":
            raise NotImplementedError

    async with upstream(reply) as server:
        result = await load(server.url, Steps())
    assert len(result.rows) == 30
    assert max(levels[:10]) == 1


async def test_the_key_and_the_path_of_the_url_are_sent() -> None:
    async with upstream(raw(WHOLE)) as server:
        await load(server.url + "/prefix/", closed(1, 1), api_key="sk-1")
    head, body = server.requests[0]
    assert head.startswith(b"POST /prefix/v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer sk-1\r\n" in head
    assert body["model"] == "m"


@pytest.mark.parametrize(
    ("reply", "ending", "message"),
    [
        (
            raw(b'HTTP/1.1 401 No\r\nContent-Length: 17\r\n\r\n{"message":"key"}'),
            Ending.HTTP,
            'HTTP 401: {"message":"key"}',
        ),
        (raw(HEAD + text("a"), close=True), Ending.RESET, "the server closed the connection"),
        (raw(HEAD + text("a") + LAST), Ending.TRUNCATED, "the stream ended without [DONE]"),
        (
            raw(HEAD + text("a") + chunk(b'data: {"error": {"message": "gone"}}\n\n'), close=True),
            Ending.STREAM_ERROR,
            "gone",
        ),
        (raw(b"nonsense\r\n\r\n"), Ending.PROTOCOL, None),
    ],
    ids=["http", "reset", "truncated", "error event", "not http"],
)
async def test_a_failed_request_is_counted_by_kind_and_the_run_goes_on(
    reply: Reply, ending: Ending, message: str | None
) -> None:
    async with upstream(reply) as server:
        result = await load(server.url, closed(2, 4))
    assert [row.ending for row in result.rows] == [ending] * 4
    if message is not None:
        assert {row.error for row in result.rows} == {message}


async def test_a_stalled_answer_is_dropped_and_its_connection_closed() -> None:
    async with upstream(never) as server:
        result = await load(server.url, closed(2, 2), idle_timeout_s=1.0)
        await server.all_closed()
    assert [row.ending for row in result.rows] == [Ending.TIMEOUT] * 2
    assert [row.events for row in result.rows] == [1, 1]


async def test_what_still_streams_at_the_cut_is_no_error() -> None:
    async with upstream(never) as server:
        pacer = ClosedLoop(Ramp(((0, 3),)), duration_s=0.3)
        result = await load(server.url, pacer, cut_s=0.3)
        await server.all_closed()
    assert [row.ending for row in result.rows] == [Ending.CUT] * 3
    assert result.duration_s == 0.3


async def test_a_server_that_refuses_every_connection_ends_the_run() -> None:
    async with upstream(raw(WHOLE)) as server:
        pass
    result = await load(server.url, closed(10, 10_000))
    assert result.gave_up is not None
    assert {row.ending for row in result.rows if row.ending is not Ending.CUT} == {Ending.CONNECT}
    assert FAILURES_IN_A_ROW_MAX <= len(result.rows) <= FAILURES_IN_A_ROW_MAX + 10


async def test_a_stopped_run_keeps_what_it_measured() -> None:
    answered = 0

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        if answered > 3:
            client.stop()
            await never(reader, writer)
        else:
            writer.write(WHOLE)

    async with upstream(reply) as server:
        client = client_of(server.url, closed(1, 100))
        result = await client.run()
    assert [row.ending for row in result.rows] == [Ending.OK] * 3 + [Ending.CUT]


async def test_progress_counts_finished_and_running_requests_per_server() -> None:
    seen = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) < 3:
            writer.write(WHOLE)
        else:
            seen.set()
            await never(reader, writer)

    async with upstream(reply) as server:
        client = client_of(server.url, closed(1, 3))
        run = asyncio.create_task(client.run())
        await asyncio.wait_for(seen.wait(), 5)
        async with asyncio.timeout(5):
            progress = client.progress()
            while progress.servers["spec"].tokens <= 8:
                await asyncio.sleep(0.001)
                progress = client.progress()
        client.stop()
        await run
    assert (progress.started, progress.finished, progress.in_flight) == (3, 2, 1)
    # Two answers of four tokens, and one event that so far carries two.
    assert progress.tokens == 10


async def test_a_turn_carries_the_answer_that_came_and_takes_the_next_start() -> None:
    async with upstream(raw(WHOLE)) as server:
        target = Target.parse(server.url, "/v1/chat/completions")
        workload = Workload("m", Fixed(8, 4), seed=1, turns=2)
        result = await run_load(Load((target,), workload, closed(1, 4)))
    assert [(row.index, row.turn) for row in result.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, second = (body["messages"] for _, body in server.requests[:2])
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert second[:2] == [*first, {"role": "assistant", "content": "ab"}]


async def test_a_conversation_whose_turn_failed_is_not_continued() -> None:
    failed = raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
    async with upstream(failed) as server:
        target = Target.parse(server.url, "/v1/chat/completions")
        workload = Workload("m", Fixed(8, 4), seed=1, turns=2)
        result = await run_load(Load((target,), workload, closed(1, 3)))
    assert [(row.index, row.turn) for row in result.rows] == [(0, 0), (1, 0), (2, 0)]


async def test_latency_counts_from_the_intended_start_however_late_the_client_is() -> None:
    times = [0.0, 0.01, 0.02, 0.03]

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:  # hold the client's own event loop up
            held_until = time.monotonic() + 0.2
            while time.monotonic() < held_until:
                pass
        writer.write(WHOLE)

    async with upstream(reply) as server:
        result = await load(server.url, OpenLoop(times))
    assert [row.intended_s for row in result.rows] == times
    for row in result.rows:
        assert row.first_s is not None
        assert row.sent_s >= row.intended_s
        assert row.first_s >= 0.2  # so that the latency from the intended start has the hold-up
    assert max(result.lags_s) > 0.1


async def test_an_open_loop_starts_requests_though_none_is_answered() -> None:
    async with upstream(never) as server:
        pacer = OpenLoop([n / 100 for n in range(20)])
        result = await load(server.url, pacer, idle_timeout_s=1.0)
    assert server.most_at_once == 20
    assert [row.ending for row in result.rows] == [Ending.TIMEOUT] * 20
    assert all(row.sent_s >= row.intended_s for row in result.rows)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h:99999"])
def test_a_bad_url_is_refused_with_its_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|port"):
        Target.parse(url, "/v1/chat/completions")
