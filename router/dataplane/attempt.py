"""One attempt: a lease, a connection, an exchange, and what became of them.

The lease is taken at once and released exactly once, at the attempt's end or when it is abandoned,
whatever happens. Only waiting for a new connection takes a task.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.breaker import Verdict
from router.core.ledger import Ledger
from router.core.types import Decision, Outcome
from router.dataplane import errors
from router.dataplane.abort import Aborter
from router.dataplane.asgi import Headers
from router.dataplane.cycle import Cycle
from router.dataplane.errors import ErrorReply, Reply
from router.dataplane.exchange import Context, Exchange
from router.dataplane.headers import REQUEST_ID, encode_head, first, new_id, own
from router.dataplane.paths import Inference
from router.dataplane.peek import Peek, splice
from router.dataplane.record import Refusal
from router.dataplane.server import Upstream
from router.dataplane.upstream import (
    ConnectError,
    Connection,
    ConnectionBroken,
    ExhaustedError,
)
from router.settings import Timeouts

logger = logging.getLogger(__name__)

# Harmless to send twice.
_IDEMPOTENT = frozenset({"GET", "HEAD"})


@dataclass(slots=True)
class Inbound:
    """A client's request, as it is to be forwarded; `admin`: it changes an engine's state."""

    cycle: Cycle
    headers: Headers
    body: bytes
    route: Inference
    peek: Peek
    request_id: str
    admin: bool = False


class Attempts:
    """Makes attempts, and holds what they share."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        ledger: Ledger,
        timeouts: Timeouts,
        gaps: Mapping[str, Callable[[float], None]],
        clock: Callable[[], float],
    ) -> None:
        self.aborter = Aborter()
        self.ledger = ledger
        self.timeouts = timeouts
        self.gaps = gaps
        self.clock = clock
        self._upstreams = upstreams
        self._swept_at = 0.0

    def sweep(self, now: float) -> None:
        """Close connections that idled too long; tell each server's health of data that flowed."""
        for upstream in self._upstreams.values():
            upstream.tick(now)
            upstream.pool.sweep(now)
            token_at = upstream.health.last_token_at
            if token_at is not None and token_at > self._swept_at:
                upstream.health.token(token_at)
        self._swept_at = now

    def make(
        self,
        inbound: Inbound,
        decision: Decision,
        over: Callable[["Attempt"], None],
        *,
        again: bool = False,
    ) -> "Attempt":
        """Return an attempt at the decided server, its lease taken.

        `over` is called at its end, but not if it is abandoned. `again`: it is not the first.
        """
        return Attempt(self, inbound, self._upstreams[decision.server], decision, over, again=again)


class Attempt:
    """One attempt under way.

    Once it is over: `refusal` is why another server may be tried, None if none may; `reply` is
    still to be sent; `broken`, the response is to be cut short, after `last`; `status` is what the
    client was sent, if it was.
    """

    __slots__ = (
        "_again", "_connecting", "_connection", "_exchange", "_lease", "_made_by", "_on_trial",
        "_over", "_rid", "_upstream", "broken", "counter", "error", "inbound", "last", "outcome",
        "own_headers", "refusal", "reply", "status", "streams",
    )  # fmt: skip

    def __init__(
        self,
        made_by: Attempts,
        inbound: Inbound,
        upstream: Upstream,
        decision: Decision,
        over: Callable[["Attempt"], None],
        *,
        again: bool,
    ) -> None:
        shape = inbound.peek.shape
        self._made_by = made_by
        self.inbound = inbound
        self._upstream = upstream
        self._over = over
        self._again = again
        self._lease = made_by.ledger.acquire(decision.server, shape, made_by.clock())
        # What asks for no tokens, such as a list of models, says nothing of an engine.
        self._on_trial = bool(shape.sequences) and upstream.health.breaker.begin()
        self.counter = upstream.tokens.counter(max(shape.sequences, 1))
        self._connecting: asyncio.Task[Connection] | None = None
        self._connection: Connection | None = None
        self._exchange: Exchange | None = None
        self._rid: str | None = None
        self.own_headers = own(inbound.request_id, decision)
        self.outcome = Outcome.UPSTREAM_ERROR
        self.reply: Reply | None = None
        self.status: int | None = None
        self.refusal: Refusal | None = None
        self.broken = False
        self.last = b""
        self.streams = False
        self.error: str | None = None

    @property
    def server(self) -> str:
        """The server's name."""
        return self._upstream.spec.name

    @property
    def response_id(self) -> str | None:
        """The id of the response object that the engine makes, None if it is not known."""
        return self._rid if self.inbound.route.rid_key == "request_id" else None

    @property
    def first_token_at(self) -> float | None:
        """When the first token came, None if none did."""
        return self._lease.first_token_at

    def start(self) -> None:
        """Send the request as soon as there is a connection: now, if one is idle."""
        connection = self._upstream.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def pause(self) -> None:
        """Read no more from the engine: the client is slower."""
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        """Read on."""
        if self._exchange is not None:
            self._exchange.resume()

    def last_words(self, reply: ErrorReply) -> bytes:
        """Return how to tell the client of an error in the middle of its stream, if it has one."""
        return b"" if self._exchange is None else self._exchange.last_words(reply)

    def abandon(self, outcome: Outcome) -> None:
        """Stop at once: nobody waits for the answer."""
        self._connecting = None  # the connection, once it is made, is for others
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon()
            self._abort()
        self._end(exchange, outcome)

    def expire(self, now: float) -> None:
        """Give up an engine that stands still for too long."""
        if self._exchange is not None:
            self._exchange.expire(now, self._made_by.timeouts)

    def _connect(self) -> None:
        connecting = asyncio.get_running_loop().create_task(self._upstream.pool.connect())
        self._connecting = connecting
        connecting.add_done_callback(self._connected)

    def _connected(self, connecting: asyncio.Task[Connection]) -> None:
        if connecting.cancelled():
            return
        error = connecting.exception()
        if self._connecting is None:  # abandoned
            if error is None:
                self._upstream.pool.put(connecting.result())
            return
        self._connecting = None
        if error is None and not connecting.result().usable:
            error = ConnectError("the connection was closed as soon as it was made")
        if error is None:
            try:
                self._send(connecting.result())
            except Exception as fault:  # noqa: BLE001  (nobody above would answer for it)
                error = fault
        if error is None:
            return
        if isinstance(error, ExhaustedError):
            self._fail(Outcome.REJECTED, errors.exhausted(), str(error))
        elif isinstance(error, ConnectError):
            self._upstream.failed(self._made_by.clock(), error)
            self.refusal = Refusal.CONNECT
            reply = errors.upstream_unreachable(self.server)
            self._fail(Outcome.UPSTREAM_ERROR, reply, str(error))
        else:
            logger.error("a request to server %s failed here", self.server, exc_info=error)
            self._fail(Outcome.UPSTREAM_ERROR, errors.internal(), "internal error")

    def _send(self, connection: Connection) -> None:
        inbound, pool = self.inbound, self._upstream.pool
        cycle = inbound.cycle
        body = self._with_rid()
        headers = [
            *self._upstream.credentials.put_on(inbound.headers, admin=inbound.admin),
            (REQUEST_ID, inbound.request_id.encode("ascii")),
        ]
        target = pool.base_path + cycle.target
        head = encode_head(cycle.method, target, pool.host, headers, len(body))
        context = Context(
            inbound.route,
            self.server,
            self._first_token,
            self._upstream.health,
            self.counter,
            self._made_by.gaps[self.server],
            self._made_by.clock,
            self.own_headers,
            self._exchanged,
            self._again,
        )
        self._exchange = Exchange(context, cycle, connection)
        self._connection = connection
        connection.start(self._exchange, head, body, head_request=cycle.method == "HEAD")
        if cycle.full:  # since before there was anything to pause
            self._exchange.pause()

    def _with_rid(self) -> bytes:
        """Return the body with an id in it that this attempt can be aborted by.

        Ids have one length, because an engine aborts whatever begins with the id that it is given.
        """
        inbound = self.inbound
        key = inbound.route.rid_key
        if key is None or not inbound.peek.abortable:
            return inbound.body
        rid = new_id()
        if key == "request_id":
            rid = f"resp_{rid}"  # it becomes the id of the response object
        self._rid = rid
        return splice(inbound.body, key, rid)

    def _exchanged(self) -> None:
        """Take the result of the exchange, unless it is to be sent again."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        if exchange.failure is not None and self._was_stale(exchange):
            self._connect()
            return
        if exchange.outcome is Outcome.TIMEOUT:
            self._abort()
        if exchange.refused:
            self.refusal = Refusal.OVERLOAD
        self.reply = exchange.reply
        self.broken = exchange.broken
        self.last = exchange.last
        self.error = exchange.error
        self._end(exchange, exchange.outcome, exchange.verdict)
        self._over(self)

    def _was_stale(self, exchange: Exchange) -> bool:
        """Whether a reused connection died without a byte, under what may be sent again."""
        connection = self._connection
        return (
            connection is not None
            and self.inbound.cycle.method in _IDEMPOTENT
            and connection.reused
            and not connection.answered
            and isinstance(exchange.failure, ConnectionBroken)
        )

    def _abort(self) -> None:
        """Tell the engine that nobody waits for the answer, where it can be told."""
        if self._rid is not None:
            headers = self._upstream.credentials.put_on(self.inbound.headers, admin=True)
            authorization = first(headers, b"authorization")
            self._made_by.aborter.abort(self._upstream.pool, self.server, self._rid, authorization)

    def _fail(self, outcome: Outcome, reply: ErrorReply, error: str) -> None:
        self.reply = reply
        self.error = error
        self._end(None, outcome)
        self._over(self)

    def _first_token(self, now: float) -> None:
        self._lease.first_token(now)
        if self._on_trial:
            self._judge(Verdict.SUCCESS, now)

    def _judge(self, verdict: Verdict, now: float) -> None:
        on_trial, self._on_trial = self._on_trial, False
        error = self.error
        if verdict is Verdict.FAILURE and error is None:
            status = self.status if self.reply is None else self.reply.status
            error = f"answered with status {status}"
        self._upstream.judged(verdict, now, error, trial=on_trial)

    def _end(
        self, exchange: Exchange | None, outcome: Outcome, verdict: Verdict = Verdict.NEUTRAL
    ) -> None:
        if exchange is not None:
            self.status = exchange.status
            self.streams = exchange.streams
        self.outcome = outcome
        self.counter.finish()
        now = self._made_by.clock()
        if self._lease.release(outcome, now) and self._lease.shape.sequences:
            # Few have something to say: most succeed at a server that has not failed of late.
            news = verdict is Verdict.FAILURE or (
                verdict is Verdict.SUCCESS and self._upstream.health.breaker.failures
            )
            if news or self._on_trial:
                self._judge(verdict, now)
