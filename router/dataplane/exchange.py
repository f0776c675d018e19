"""One request on one engine connection: the engine's bytes come in by callbacks, and go out.

    HEAD --event stream--> HOLD --first event--> BODY --end--> OVER
    HEAD --anything else---------------------->  BODY

Until BODY nothing has been sent to the client (commit-late). What goes wrong before it can still
become a proper error response, and an error that an engine reports inside a 200 becomes the status
that it should have been. What goes wrong in BODY ends the open event, adds one error event, and
breaks the connection: a client then sees an error, never an answer that looks complete.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from router.core.health import ServerHealth
from router.core.ledger import Lease
from router.core.tokens import TokenCounter
from router.core.types import Outcome
from router.dataplane import errors, sse
from router.dataplane.asgi import Headers
from router.dataplane.errors import ErrorReply
from router.dataplane.headers import first, forwarded_response
from router.dataplane.outlet import Outlet
from router.dataplane.paths import Inference
from router.dataplane.upstream import NO_BODY, BodyTruncated, Connection, UpstreamError
from router.settings import Timeouts


class _Stage(Enum):
    HEAD = auto()
    HOLD = auto()
    BODY = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Context:
    """What an exchange needs to know of its server and its request."""

    route: Inference
    lease: Lease
    health: ServerHealth
    counter: TokenCounter
    gap: Callable[[float], None]
    timeouts: Timeouts
    clock: Callable[[], float]
    own_headers: Headers


class Exchange:
    """The sink of one upstream response, and the source of the client's.

    `done` is set when no callback will send any more. Then `outcome` says how it ended; `reply` is
    the error to send if nothing was sent so far; `broken`, that the response is to be cut short;
    `failure`, what the connection reported.
    """

    __slots__ = (
        "_clock", "_connection", "_context", "_counter", "_gap", "_head", "_health", "_held",
        "_last_at", "_outlet", "_reported_error", "_sent_at", "_stage", "_tail", "_token_marker",
        "_waiting", "broken", "complete", "done", "error", "failure", "outcome", "reply", "status",
        "streams",
    )  # fmt: skip

    def __init__(self, context: Context, outlet: Outlet, connection: Connection) -> None:
        self._context = context
        self._clock = context.clock
        self._outlet = outlet
        self._connection = connection
        self._gap = context.gap
        self._counter = context.counter
        self._health = context.health
        self._token_marker = context.route.token_marker
        self._stage = _Stage.HEAD
        self._head: tuple[int, Headers] = (0, [])
        self._held = b""
        self._tail = b""
        self._waiting = True
        self._reported_error = False
        self._sent_at = self._last_at = context.clock()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams = False
        self.status: int | None = None
        self.outcome = Outcome.OK
        self.reply: ErrorReply | sse.Refusal | None = None
        self.broken = False
        self.complete = False
        self.failure: UpstreamError | None = None
        self.error: str | None = None
        outlet.attach(self)

    # The upstream connection's side.

    def on_head(self, status: int, headers: Headers) -> None:
        """Take the engine's status: commit, or hold it back until the first event."""
        self._head = (status, headers)
        content_type = first(headers, b"content-type") or b""
        # Compressed in spite of our asking: no event can be seen in it.
        legible = first(headers, b"content-encoding") in (None, b"identity")
        self.streams = status == 200 and legible and sse.is_event_stream(content_type)
        if self.streams:
            self._stage = _Stage.HOLD
        else:
            self._waiting = False
            self._last_at = self._context.clock()
            self._commit()

    def on_body(self, data: bytes) -> None:
        """Relay the next bytes.

        Called per chunk: no task, timer, JSON, or search for the end of an event.
        """
        # Callables are read before they are called: on a slot, both at once is slower.
        clock, gap = self._clock, self._gap
        now = clock()
        if self.status is None:
            self._hold(data, now)
            return
        if self.streams:
            gap(now - self._last_at)
        self._last_at = now
        self._pass(data, now)

    def on_end(self) -> None:
        """End the response, unless the stream lacks its end."""
        self.complete = True
        marker = self._context.route.end_marker
        incomplete = (
            self.streams
            and marker is not None
            and not self._reported_error
            and not sse.ends_with(self._tail, marker)
        )
        if self._stage is _Stage.HOLD and not incomplete:
            self._release(self._context.clock())
        if incomplete:
            self._give_up(errors.upstream_truncated(self._server))
        elif self._stage is _Stage.BODY:
            self._outlet.end()
            failed = Outcome.UPSTREAM_ERROR if self._reported_error else None
            self._over(failed or errors.outcome_of(self._head[0]))

    def on_fail(self, error: UpstreamError) -> None:
        """Tell the client that the engine broke off."""
        self.failure = error
        truncated = isinstance(error, BodyTruncated) and self.status is not None
        make = errors.upstream_truncated if truncated else errors.upstream_broken
        self._give_up(make(self._server), str(error))

    # The outlet's side.

    def pause(self) -> None:
        """Read no more: the client is slower."""
        self._connection.pause()

    def resume(self) -> None:
        """Read on. The pause was not the engine's."""
        self._last_at = self._clock()
        self._connection.resume()

    def send_failed(self, error: Exception) -> None:
        """Give up: our HTTP server takes no more of this response."""
        self._connection.abort()
        self.broken = True
        self._over(Outcome.UPSTREAM_ERROR, f"the response cannot be sent: {error}")

    # The relay's side.

    def client_gone(self) -> None:
        """Stop at once: nobody is left to read."""
        if self._stage is not _Stage.OVER:
            self._connection.abort()
            self._outlet.discard()
            self._over(Outcome.CLIENT_DISCONNECT)

    def expire(self, now: float) -> None:
        """Give up what stands still for too long, on either side. Called about once a second."""
        limits = self._context.timeouts
        stalled_at = self._outlet.stalled_at
        if stalled_at is not None:
            if now - stalled_at > limits.idle_s:
                self._forsake("the client stopped reading")
        elif self._stage is _Stage.OVER:
            return
        elif self._waiting and now - self._sent_at > limits.first_byte_s:
            self._connection.abort()
            self._give_up(errors.first_byte_timeout(self._server, limits.first_byte_s))
        elif not self._waiting and now - self._last_at > limits.idle_s:
            self._connection.abort()
            self._give_up(errors.idle_timeout(self._server, limits.idle_s))

    @property
    def _server(self) -> str:
        return self._context.lease.server

    def _hold(self, data: bytes, now: float) -> None:
        """Keep the beginning of a stream until its first event is complete."""
        self._held += data
        event = sse.first_event(self._held)
        if event is None and len(self._held) <= sse.HOLD_BYTES_MAX:
            return
        refusal = sse.refusal(event) if event is not None else None
        if refusal is None:
            self._release(now)
            return
        self._connection.abort()
        self.reply = refusal
        self._over(errors.outcome_of(refusal.status), "refused in the stream")

    def _release(self, now: float) -> None:
        held, self._held = self._held, b""
        self._commit()
        self._last_at = now
        if self._token_marker is None:
            self._first_token(now)
        self._pass(held, now)

    def _commit(self) -> None:
        status, headers = self._head
        self._stage = _Stage.BODY
        self.status = status
        headers = forwarded_response(headers)
        if status in NO_BODY:
            # A length without a body would break our own framing.
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        self._outlet.start(status, headers + self._context.own_headers)

    def _pass(self, data: bytes, now: float) -> None:
        if self.streams:
            self._tail = sse.tail(self._tail, data)
            if sse.reports_error(data):
                self._reported_error = True
            if self._token_marker is not None and self._token_marker in data:
                self._token_marker = None
                self._first_token(now)
        if self.status == 200:
            self._health.last_token_at = now
            self._counter.feed(data)
        self._outlet.write(data)

    def _first_token(self, now: float) -> None:
        self._waiting = False
        self._context.lease.first_token(now)

    def _give_up(self, reply: ErrorReply, error: str | None = None) -> None:
        """End with an error: as a response if that is still possible, else by breaking it."""
        if self._stage is _Stage.OVER:
            return
        if self.status is None:
            self.reply = reply
        else:
            self.broken = True
            if self.streams:
                self._outlet.write(sse.closing(self._tail) + reply.event())
        self._over(reply.outcome, error or reply.message)

    def _forsake(self, error: str) -> None:
        """Break the response to a client that takes no more, even if the engine's part is over."""
        if self._stage is _Stage.OVER:
            # The connection may be another exchange's by now: hands off.
            self.outcome, self.error = Outcome.CLIENT_DISCONNECT, error
        else:
            self._connection.abort()
            self._over(Outcome.CLIENT_DISCONNECT, error)
        self._outlet.discard()
        self.broken = True

    def _over(self, outcome: Outcome, error: str | None = None) -> None:
        if self._stage is _Stage.OVER:
            return
        self._stage = _Stage.OVER
        self.outcome = outcome
        self.error = error
        self._outlet.attach(None)
        if not self.done.done():
            self.done.set_result(None)
