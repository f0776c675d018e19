"""The load client: starts the requests that a pacer wants, and writes a row for each.

One event loop, callbacks only. The pacer is asked when a request ends and at a tick. The tick also
looks for stalled requests, and is the gauge of the client's own lag: by how much it comes late.
"""

import asyncio
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.pacing import Pacer
from loadtest.record import Ending, RequestRow
from loadtest.tally import Tally
from loadtest.target import Target
from loadtest.workload import Workload
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


class _Request:
    """One request in flight: the sink of its answer and the writer of its row."""

    __slots__ = ("_error_body", "_run", "connection", "last_activity", "row", "tally")

    def __init__(self, row: RequestRow, run: "LoadClient", now: float) -> None:
        self.row = row
        self.tally = Tally()
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


@dataclass(frozen=True, slots=True)
class ServerProgress:
    """What one server has done so far. Tokens of unfinished requests are estimated from events."""

    in_flight: int = 0
    requests: int = 0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A look at a run under way."""

    elapsed_s: float
    started: int
    finished: int
    errors: int
    in_flight: int
    servers: Mapping[str, ServerProgress]

    @property
    def tokens(self) -> float:
        """Tokens of all servers."""
        return sum(server.tokens for server in self.servers.values())


@dataclass(slots=True)
class RunResult:
    """A run's rows and what the client itself cost."""

    rows: list[RequestRow]
    duration_s: float
    cpu_s: float
    lags_s: "array[float]"
    gave_up: str | None = None


@dataclass(slots=True)
class _Done:
    requests: int = 0
    tokens: int = 0
    events: int = 0


@dataclass(slots=True)
class LoadClient:
    """One run. `cut_s` ends it at that time whatever still streams; else it waits for the last."""

    target: Target
    workload: Workload
    pacer: Pacer
    cut_s: float | None = None
    idle_timeout_s: float = 120.0
    rows: list[RequestRow] = field(default_factory=list)
    _pool: Pool = field(init=False)
    _active: set[_Request] = field(default_factory=set)
    _sends: set[asyncio.Task[None]] = field(default_factory=set)
    _done: dict[str, _Done] = field(default_factory=dict)
    _lags: "array[float]" = field(default_factory=lambda: array("d"))
    _errors: int = 0
    _answered: bool = False
    _failures_in_a_row: int = 0
    _began: float = 0.0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False
    _gave_up: str | None = None
    _bug: BaseException | None = None

    def __post_init__(self) -> None:
        self._pool = Pool(
            self.target.url,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            keepalive_s=KEEPALIVE_S,
            clock=time.monotonic,
        )

    async def run(self) -> RunResult:
        """Run to the end and return the rows, in the order of their start."""
        cpu = time.process_time()
        self._began = time.monotonic()
        try:
            self._tick(self._began)
            await self._ended.wait()
            if self._bug is not None:
                raise self._bug
        finally:
            elapsed = self._elapsed()
            self._stopped = True
            for request in tuple(self._active):
                request.drop(Ending.CUT)
            for task in self._sends:
                task.cancel()
            self._pool.close()
        duration_s = elapsed if self.cut_s is None else min(elapsed, self.cut_s)
        cpu_s = time.process_time() - cpu
        return RunResult(self.rows, duration_s, cpu_s, self._lags, self._gave_up)

    def _tick(self, due: float) -> None:
        now = time.monotonic()
        if len(self._lags) < LAGS_MAX:
            self._lags.append(now - due)
        for request in tuple(self._active):
            if now - request.last_activity > self.idle_timeout_s:
                request.drop(Ending.TIMEOUT, f"nothing arrived for {self.idle_timeout_s:g} s")
        self._start_due()
        if self._over():
            self._ended.set()
        else:
            asyncio.get_running_loop().call_later(TICK_S, self._tick, now + TICK_S)

    def stop(self) -> None:
        """End the run now; what was measured is kept."""
        self._stopped = True

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
        row.first_s = None if tally.first is None else tally.first - self._began
        row.last_s = None if tally.last is None else tally.last - self._began
        row.prompt_tokens, row.tokens = tally.usage()
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

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _over(self) -> bool:
        elapsed = self._elapsed()
        if self._stopped or (self.cut_s is not None and elapsed >= self.cut_s):
            return True
        return not self._active and self.pacer.over(elapsed, len(self.rows))

    def _start_due(self) -> None:
        elapsed = self._elapsed()
        if self._stopped or len(self.rows) >= ROWS_MAX:
            return
        for intended_s in self.pacer.due(elapsed, len(self.rows), len(self._active)):
            self._start(intended_s)

    def _start(self, intended_s: float) -> None:
        ask = self.workload.ask(len(self.rows))
        body = self.workload.body(ask)
        now = time.monotonic()
        row = RequestRow(ask.index, intended_s, now - self._began, ask.output_tokens)
        request = _Request(row, self, now)
        self.rows.append(row)
        self._active.add(request)
        task = asyncio.create_task(self._send(request, body))
        self._sends.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._stopped = True

    async def _send(self, request: _Request, body: bytes) -> None:
        try:
            connection = await self._pool.connection()
        except ConnectError as error:
            request.drop(Ending.CONNECT, str(error))
            return
        if request not in self._active:
            connection.abort()
            return
        request.connection = connection
        connection.start(request, self.target.head(body), body)
