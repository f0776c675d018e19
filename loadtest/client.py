"""The load client: starts the requests that a pacer wants, and writes a row for each.

One event loop, callbacks only. The pacer is asked when a request ends, when its next one is due and
at a tick. The tick also looks for stalled requests. The client's own lag is by how much ticks and
requests that a clock decides come late.
"""

import asyncio
import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from loadtest.load import Load
from loadtest.record import Ending, Progress, RequestRow, RunResult, ServerProgress
from loadtest.tally import Tally
from loadtest.target import Target
from router.dataplane.asgi import Headers
from router.dataplane.upstream import (
    BadResponse,
    BodyTruncated,
    ConnectError,
    Connection,
    Pool,
    UpstreamError,
)

TICK_S = 0.02
CONNECT_TIMEOUT_S = 10.0
# Well below the keep-alive of common servers (uvicorn: 5 s), whose close could meet a request.
KEEPALIVE_S = 2.0
ROWS_MAX = 1_000_000
ERROR_BODY_BYTES_MAX = 4096
LAGS_MAX = 1_000_000
# So many failures in a row, with nothing answered ever, and the run gives up.
FAILURES_IN_A_ROW_MAX = 50


def _ending(error: UpstreamError) -> Ending:
    if isinstance(error, BodyTruncated):
        return Ending.TRUNCATED
    return Ending.PROTOCOL if isinstance(error, BadResponse) else Ending.RESET


@dataclass(slots=True)
class _Talk:
    """A conversation between two of its turns: what was said and answered so far."""

    index: int
    turns: int
    history: list[tuple[str, str]] = field(default_factory=list)


class _Request:
    """One request in flight: the sink of its answer and the writer of its row."""

    __slots__ = ("_error_body", "_run", "connection", "last_activity", "row", "talk", "tally")

    def __init__(self, row: RequestRow, talk: _Talk, run: "LoadClient", now: float) -> None:
        self.row = row
        self.talk = talk
        self.tally = Tally(keep_text=talk.turns > len(talk.history) + 1)
        self.connection: Connection | None = None
        self.last_activity = now
        self._run = run
        self._error_body = b""

    def on_head(self, status: int, headers: Headers) -> None:
        self.row.status = status
        for name, value in headers:
            if name == b"x-crossover-server":
                self.row.server = value.decode("latin-1")
            elif name == b"x-crossover-reason":
                self.row.reason = value.decode("latin-1")

    def on_body(self, chunk: bytes) -> None:
        now = self.last_activity = time.monotonic()
        self.row.body_bytes += len(chunk)
        if self.row.status == 200:
            try:
                self.tally.feed(chunk, now)
            except ValueError as error:
                self.drop(Ending.PROTOCOL, str(error))
        elif len(self._error_body) < ERROR_BODY_BYTES_MAX:
            self._error_body += chunk

    def on_end(self) -> None:
        message = None
        if self.row.status != 200:
            ending = Ending.HTTP
            text = " ".join(self._error_body[:300].decode(errors="replace").split())
            message = f"HTTP {self.row.status}: {text}"
        elif self.tally.error_event is not None:
            ending, message = Ending.STREAM_ERROR, self.tally.error_message()
        elif self.tally.done:
            ending = Ending.OK
        else:
            ending, message = Ending.TRUNCATED, "the stream ended without [DONE]"
        self._run.finish(self, ending, message)

    def on_fail(self, error: UpstreamError) -> None:
        ending, message = _ending(error), str(error)
        if self.tally.error_event is not None:
            ending, message = Ending.STREAM_ERROR, self.tally.error_message() or message
        self._run.finish(self, ending, message)

    def drop(self, ending: Ending, message: str | None = None) -> None:
        """End the request from this side: the server sees the connection close."""
        if self.connection is not None:
            self.connection.abort()
        self._run.finish(self, ending, message)


@dataclass(slots=True)
class _Done:
    requests: int = 0
    tokens: int = 0
    events: int = 0


def pool_of(target: Target) -> Pool:
    """Return a pool of connections to a target. Made within an event loop, closed by its maker."""
    return Pool(
        target.url,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        keepalive_s=KEEPALIVE_S,
        clock=time.monotonic,
    )


@dataclass(slots=True)
class LoadClient:
    """One process's part of one load, without its warm-up; `pools` are the targets' connections."""

    load: Load
    pools: tuple[Pool, ...]
    rows: list[RequestRow] = field(default_factory=list)
    began: float = 0.0  # on the monotonic clock
    _active: set[_Request] = field(default_factory=set)
    _sends: set[asyncio.Task[None]] = field(default_factory=set)
    _talks: deque[_Talk] = field(default_factory=deque)  # that wait for their next turn
    _talks_begun: int = 0
    _done: dict[str, _Done] = field(default_factory=dict)
    _lags: "array[float]" = field(default_factory=lambda: array("d"))
    _errors: int = 0
    _answered: bool = False
    _failures_in_a_row: int = 0
    _next: asyncio.TimerHandle | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False
    _interrupted: bool = False
    _gave_up: str | None = None
    _bug: BaseException | None = None

    async def run(self, began: float | None = None) -> RunResult:
        """Run from `began` on the monotonic clock, or now, to the end; return what it measured."""
        self.began = time.monotonic() if began is None else began
        await asyncio.sleep(max(self.began - time.monotonic(), 0.0))
        cpu_s = time.process_time()
        try:
            self._tick(self.began)
            await self._ended.wait()
            if self._bug is not None:
                raise self._bug
        finally:
            elapsed = self._elapsed()
            self._stopped = True
            if self._next is not None:
                self._next.cancel()
            for request in tuple(self._active):
                request.drop(Ending.CUT)
            for task in self._sends:
                task.cancel()
        cut_s = self.load.cut_s
        return RunResult(
            rows=self.rows,
            duration_s=elapsed if cut_s is None else min(elapsed, cut_s),
            cpu_s=time.process_time() - cpu_s,
            lags_s=self._lags,
            gave_up=self._gave_up,
            interrupted=self._interrupted,
        )

    def _tick(self, due: float) -> None:
        now = time.monotonic()
        self._late(now - due)
        idle_timeout_s = self.load.idle_timeout_s
        for request in tuple(self._active):
            if now - request.last_activity > idle_timeout_s:
                request.drop(Ending.TIMEOUT, f"nothing arrived for {idle_timeout_s:g} s")
        self._start_due()
        if self._over():
            self._ended.set()
        else:
            asyncio.get_running_loop().call_later(TICK_S, self._tick, now + TICK_S)

    def stop(self) -> None:
        """End the run now; what was measured is kept."""
        if not self._stopped:
            self._stopped = self._interrupted = True

    def progress(self) -> Progress:
        """Return how far the run is."""
        active: dict[str, tuple[int, int]] = {}
        for request in self._active:
            name = request.row.server or ""
            count, events = active.get(name, (0, 0))
            active[name] = (count + 1, events + request.tally.events)
        servers = {}
        for name in sorted(active.keys() | self._done.keys()):
            done = self._done.get(name, _Done())
            count, events = active.get(name, (0, 0))
            per_event = done.tokens / done.events if done.events else 1.0
            servers[name] = ServerProgress(
                count, done.requests + count, done.tokens + events * per_event
            )
        finished = len(self.rows) - len(self._active)
        return Progress(
            self._elapsed(), len(self.rows), finished, self._errors, len(self._active), servers
        )

    def finish(self, request: _Request, ending: Ending, message: str | None) -> None:
        """Complete a request's row, once."""
        if request not in self._active:
            return
        self._active.discard(request)
        row, tally = request.row, request.tally
        row.ending, row.error, row.end_s = ending, message, self._elapsed()
        row.events, row.gaps_s = tally.events, tally.gaps
        row.first_s = None if tally.first is None else tally.first - self.began
        row.last_s = None if tally.last is None else tally.last - self.began
        row.prompt_tokens, row.tokens = tally.usage()
        if ending is Ending.OK:
            self._talk_on(request)
        self._errors += ending.is_error
        if not ending.is_error:  # after an error the next tick is soon enough: no storm of retries
            asyncio.get_running_loop().call_soon(self._start_due)
        done = self._done.setdefault(row.server or "", _Done())
        done.requests += 1
        if row.tokens is not None:
            done.tokens += row.tokens
            done.events += row.events
        self._answered = self._answered or row.events > 0
        if ending.is_error and not self._answered:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES_IN_A_ROW_MAX:
                self._gave_up = message
                self._stopped = True

    def _talk_on(self, request: _Request) -> None:
        """Queue the next turn of a conversation: the next request to start continues it."""
        talk = request.talk
        turn = len(talk.history)
        if turn + 1 < talk.turns:
            said = self.load.workload.prompt(self.load.workload.ask(talk.index, turn))
            talk.history.append((said, request.tally.text()))
            self._talks.append(talk)

    def _late(self, lag_s: float) -> None:
        if len(self._lags) < LAGS_MAX:
            self._lags.append(max(lag_s, 0.0))

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _over(self) -> bool:
        elapsed, cut_s = self._elapsed(), self.load.cut_s
        if self._stopped or (cut_s is not None and elapsed >= cut_s):
            return True
        done = len(self.rows) >= ROWS_MAX or self.load.pacer.over(elapsed, len(self.rows))
        return not self._active and done

    def _start_due(self) -> None:
        elapsed, pacer = self._elapsed(), self.load.pacer
        if self._stopped or len(self.rows) >= ROWS_MAX:
            return
        by_clock = pacer.next_s(len(self.rows)) is not None
        for intended_s in pacer.due(elapsed, len(self.rows), len(self._active)):
            self._start(intended_s)
            if by_clock:
                self._late(self.rows[-1].sent_s - intended_s)
        next_s = pacer.next_s(len(self.rows))
        if self._next is not None:
            self._next.cancel()
        if next_s is not None:
            wait_s = max(next_s - self._elapsed(), 0.0)
            self._next = asyncio.get_running_loop().call_later(wait_s, self._start_due)

    def _next_talk(self) -> _Talk:
        if self._talks:
            return self._talks.popleft()
        index = self.load.first + self.load.stride * self._talks_begun
        self._talks_begun += 1
        return _Talk(index, self.load.workload.turns_of(index))

    def _start(self, intended_s: float) -> None:
        talk, workload = self._next_talk(), self.load.workload
        ask = workload.ask(talk.index, len(talk.history))
        body = workload.body(ask, talk.history)
        now = time.monotonic()
        which = talk.index % len(self.pools)
        target = self.load.targets[which]
        row = RequestRow(talk.index, intended_s, now - self.began, ask.output_tokens)
        row.turn, row.url = ask.turn, target.url
        request = _Request(row, talk, self, now)
        self.rows.append(row)
        self._active.add(request)
        task = asyncio.create_task(self._send(request, self.pools[which], target.head(body), body))
        self._sends.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._stopped = True

    async def _send(self, request: _Request, pool: Pool, head: bytes, body: bytes) -> None:
        try:
            connection = await pool.connection()
        except ConnectError as error:
            request.drop(Ending.CONNECT, str(error))
            return
        if request not in self._active:
            connection.abort()
            return
        request.connection = connection
        request.row.sent_s = self._elapsed()
        connection.start(request, head, body)
