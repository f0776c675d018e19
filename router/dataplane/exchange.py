"""One request on one engine connection: the engine's bytes come in by callbacks, and go out.

    HEAD --event stream--> HOLD --first event--> BODY --end--> OVER
    HEAD --429, 503------> KEEP -----------------end---------> OVER
    HEAD --anything else---------------------->  BODY

Until BODY nothing has been sent to the client (commit-late). What goes wrong before it can still
become a proper error response, an error that an engine reports inside a 200 becomes the status that
it should have been, and a request that an engine refuses because it is full may go to another; the
refusal is kept whole, in case there is none. What goes wrong in BODY ends the open event, adds one
error event, and breaks the connection: a client then sees an error, never an answer that looks
complete. A stream
that has had its end is whole, whatever its connection does after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from router.core.breaker import Verdict
from router.core.health import ServerHealth
from router.core.tokens import TokenCounter
from router.core.types import Outcome
from router.dataplane import errors, sse
from router.dataplane.asgi import Headers
from router.dataplane.cycle import Cycle
from router.dataplane.errors import ErrorReply, Reply
from router.dataplane.headers import DO_NOT_RETRY, NO_BODY, first, forwarded_response
from router.dataplane.paths import Inference
from router.dataplane.upstream import BodyTruncated, Connection, UpstreamError
from router.settings import Timeouts


class _Stage(Enum):
    HEAD = auto()
    HOLD = auto()
    KEEP = auto()
    BODY = auto()
    OVER = auto()


@dataclass(slots=True)
class Context:
    """What an exchange needs to know of its server and its request.

    `over` is called once, when no callback will send any more; `first_token` as the first one
    comes. `again`: this is not the request's first attempt.
    """

    route: Inference
    server: str
    first_token: Callable[[float], None]
    health: ServerHealth
    counter: TokenCounter
    gap: Callable[[float], None]
    clock: Callable[[], float]
    own_headers: Headers
    over: Callable[[], None]
    again: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A response of an engine, kept whole; `given` are the headers that go to the client."""

    status: int
    given: Headers
    data: bytes

    def body(self) -> bytes:
        """Return its body."""
        return self.data

    def headers(self) -> Headers:
        """Return its headers, but for the length of the body."""
        return [pair for pair in self.given if pair[0] != b"content-length"]


class Exchange:
    """The sink of one upstream response, and the source of the client's.

    Once it is over, `outcome` says how it ended; `reply` is the error to send if nothing was sent
    so far; `broken`, that the response is to be cut short, after `last`; `failure`, what the
    connection reported.
    """

    __slots__ = (
        "_clock", "_connection", "_context", "_counter", "_cycle", "_ended", "_gap", "_head",
        "_health", "_held", "_last_at", "_reported_error", "_sent_at", "_stage", "_tail",
        "_token_marker", "_waiting", "broken", "complete", "error", "failure", "last", "outcome",
        "reply", "status", "streams",
    )  # fmt: skip

    def __init__(self, context: Context, cycle: Cycle, connection: Connection) -> None:
        self._context = context
        self._clock = context.clock
        self._cycle = cycle
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
        self._reported_error = self._ended = False
        self._sent_at = self._last_at = context.clock()
        self.streams = False
        self.status: int | None = None
        self.outcome = Outcome.OK
        self.reply: Reply | None = None
        self.broken = False
        self.last = b""
        self.failure: UpstreamError | None = None
        self.error: str | None = None

    # The upstream connection's side.

    def on_head(self, status: int, headers: Headers) -> None:
        """Take the engine's status: commit, or hold it back until the first event."""
        self._head = (status, headers)
        self.streams = status == 200 and sse.is_event_stream(first(headers, b"content-type") or b"")
        if self.streams and first(headers, b"content-encoding") not in (None, b"identity"):
            self.streams = False  # compressed in spite of our asking: no event can be seen in it
        if self.streams:
            self._stage = _Stage.HOLD
            return
        self._waiting = False
        self._last_at = self._clock()
        if errors.outcome_of(status) is Outcome.UPSTREAM_OVERLOAD and self._cycle.method != "HEAD":
            self._stage = _Stage.KEEP
        else:
            self._commit()

    def on_body(self, data: bytes) -> None:
        """Relay the next bytes.

        Called per chunk: no task, timer, JSON, or search for the end of an event.
        """
        # Callables are read before they are called: on a slot, both at once is slower.
        clock, gap = self._clock, self._gap
        now = clock()
        if self.status is None:
            if self._stage is _Stage.KEEP:
                self._keep(data, now)
            else:
                self._hold(data, now)
            return
        if self.streams:
            gap(now - self._last_at)
        self._last_at = now
        self._pass(data, now)

    def on_end(self) -> None:
        """End the response, unless the stream lacks its end."""
        if self._lacks_end():
            self._give_up(errors.upstream_truncated(self._server))
            return
        if self._stage is _Stage.HOLD:
            self._release(self._clock())
        elif self._stage is _Stage.KEEP:
            status, headers = self._head
            self.reply = Kept(status, forwarded_response(headers), self._held)
            self._over(errors.outcome_of(status), "refused")
            return
        failed = Outcome.UPSTREAM_ERROR if self._reported_error else None
        self._over(failed or errors.outcome_of(self._head[0]))

    def on_fail(self, error: UpstreamError) -> None:
        """Tell the client that the engine broke off."""
        self.failure = error
        truncated = isinstance(error, BodyTruncated) and self.status is not None
        make = errors.upstream_truncated if truncated else errors.upstream_broken
        self._give_up(make(self._server), str(error))

    # The client's side.

    def pause(self) -> None:
        """Read no more: the client is slower."""
        self._connection.pause()

    def resume(self) -> None:
        """Read on. The pause was not the engine's."""
        self._last_at = self._clock()
        self._connection.resume()

    def last_words(self, reply: ErrorReply) -> bytes:
        """Return how to tell the client of an error in the middle of its stream, if it has one."""
        if self.status is None or not self.streams:
            return b""
        return sse.closing(self._tail) + reply.event()

    def abandon(self) -> None:
        """Stop at once: nobody waits for the answer. `over` is not called."""
        self._stage = _Stage.OVER
        self._connection.abort()

    def expire(self, now: float, limits: Timeouts) -> None:
        """Give up an engine that stands still for too long. Called about once a second."""
        if self._waiting and now - self._sent_at > limits.first_byte_s:
            self._connection.abort()
            self._give_up(errors.first_byte_timeout(self._server, limits.first_byte_s))
        elif not self._waiting and now - self._last_at > limits.idle_s:
            self._connection.abort()
            self._give_up(errors.idle_timeout(self._server, limits.idle_s))

    @property
    def refused(self) -> bool:
        """Whether the engine said that it is full, and the client has been sent nothing."""
        return (
            self.status is None
            and self.outcome is Outcome.UPSTREAM_OVERLOAD
            and self.reply is not None
        )

    @property
    def verdict(self) -> Verdict:
        """What this says of its server, once it is over and was not abandoned."""
        if self.failure is not None or self.outcome is Outcome.TRUNCATED:
            return Verdict.FAILURE
        status = self.status or (0 if self.reply is None else self.reply.status)
        if self.outcome is Outcome.OK:
            return Verdict.SUCCESS
        # 501: what was asked for does not exist there.
        if self.outcome is Outcome.UPSTREAM_ERROR and status >= 500 and status != 501:
            return Verdict.FAILURE
        return Verdict.NEUTRAL

    @property
    def _server(self) -> str:
        return self._context.server

    def _keep(self, data: bytes, now: float) -> None:
        """Keep the body of a refusal, or pass it on if it is too long for one."""
        self._last_at = now
        self._held += data
        if len(self._held) > sse.HOLD_BYTES_MAX:
            self._release(now)

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
        if self.streams and self._token_marker is None:
            self._first_token(now)
        if held:
            self._pass(held, now)

    def _has_end(self) -> bool:
        marker = self._context.route.end_marker
        if not self.streams or marker is None:
            return False
        return self._ended or sse.ends_with(self._tail, marker)

    def _lacks_end(self) -> bool:
        if not self.streams or self._context.route.end_marker is None or self._reported_error:
            return False
        return not self._has_end()

    def _commit(self) -> None:
        status, headers = self._head
        self._stage = _Stage.BODY
        self.status = status
        headers = forwarded_response(headers)
        if status in NO_BODY:
            # A length without a body would break our own framing.
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        if self._context.again and status >= 400:
            headers.append(DO_NOT_RETRY)
        self._cycle.start(status, headers + self._context.own_headers)

    def _pass(self, data: bytes, now: float) -> None:
        if self.streams:
            if data.startswith(b":") and self._has_end():
                self._ended = True  # comments may follow the end
            before = self._tail
            self._tail = data if len(data) >= sse.TAIL_BYTES else sse.tail(before, data)
            if sse.reports_error(before, data):
                self._reported_error = True
            marker = self._token_marker
            if marker is not None and marker in before[-sse.TAIL_BYTES :] + data:
                self._token_marker = None
                self._first_token(now)
        if self.status == 200:
            self._health.last_token_at = now
            self._counter.feed(data)
        self._cycle.write(data)

    def _first_token(self, now: float) -> None:
        self._waiting = False
        self._context.first_token(now)

    def _give_up(self, reply: ErrorReply, error: str | None = None) -> None:
        """End with an error: as a response if that is still possible, else by breaking it."""
        if self._stage is _Stage.OVER:
            return
        if self.status is None:
            self.reply = reply
        elif self._has_end():
            self._over(Outcome.UPSTREAM_ERROR if self._reported_error else Outcome.OK)
            return
        else:
            self.broken = True
            self.last = self.last_words(reply)
        self._over(reply.outcome, error or reply.message)

    def _over(self, outcome: Outcome, error: str | None = None) -> None:
        if self._stage is _Stage.OVER:
            return
        self._stage = _Stage.OVER
        self.outcome = outcome
        self.error = error
        self._context.over()
