"""One attempt: a lease, a connection, an exchange, and what became of them.

The lease is taken before anything is awaited and released in `finally`, so that it comes back
exactly once whatever happens. A retry after a refusal belongs to the caller: all that it needs to
know is in the verdict.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex

from router.core.ledger import Ledger
from router.core.types import Decision, Outcome
from router.dataplane import errors
from router.dataplane.abort import Aborter
from router.dataplane.asgi import Headers
from router.dataplane.client import Client
from router.dataplane.errors import ErrorReply
from router.dataplane.exchange import Context, Exchange
from router.dataplane.headers import REQUEST_ID, encode_head, first, own
from router.dataplane.outlet import Outlet
from router.dataplane.paths import Inference
from router.dataplane.peek import Peek, splice
from router.dataplane.sse import Refusal
from router.dataplane.upstream import (
    ConnectError,
    Connection,
    ConnectionBroken,
    ExhaustedError,
    Upstream,
)
from router.settings import Timeouts

# Harmless to send twice.
_IDEMPOTENT = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class Inbound:
    """A client's request, as it is to be forwarded. `target` is path and query as they came."""

    method: str
    target: bytes
    headers: Headers
    body: bytes
    route: Inference
    peek: Peek
    request_id: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended. `refused_connection`: nothing was sent, another server may be tried.

    `reply` is still to be sent; `broken`, the response is to be cut short; `status` is what the
    client was sent, if it was.
    """

    outcome: Outcome
    reply: ErrorReply | Refusal | None = None
    status: int | None = None
    refused_connection: bool = False
    broken: bool = False
    streams: bool = False
    error: str | None = None
    first_token_at: float | None = None
    output_tokens: int = 0
    tokens_exact: bool = False


class Attempts:
    """Makes attempts, and sweeps those under way for what stands still."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        ledger: Ledger,
        timeouts: Timeouts,
        gaps: Mapping[str, Callable[[float], None]],
        clock: Callable[[], float],
    ) -> None:
        self.aborter = Aborter()
        self._upstreams = upstreams
        self._ledger = ledger
        self._timeouts = timeouts
        self._gaps = gaps
        self._clock = clock
        self._open: set[Exchange] = set()
        self._swept_at = 0.0

    @property
    def open_exchanges(self) -> int:
        """Exchanges under way."""
        return len(self._open)

    def sweep(self, now: float) -> None:
        """Expire exchanges and idle connections; tell each server's health of data that flowed."""
        for exchange in tuple(self._open):
            exchange.expire(now)
        for upstream in self._upstreams.values():
            upstream.pool.sweep(now)
            token_at = upstream.health.last_token_at
            if token_at is not None and token_at > self._swept_at:
                upstream.health.token(token_at)
        self._swept_at = now

    async def make(
        self, inbound: Inbound, decision: Decision, client: Client, outlet: Outlet
    ) -> Verdict:
        """Send the request to the decided server and its answer to the client."""
        upstream = self._upstreams[decision.server]
        shape = inbound.peek.shape
        lease = self._ledger.acquire(decision.server, shape, self._clock())
        outcome = Outcome.UPSTREAM_ERROR
        try:
            context = Context(
                route=inbound.route,
                lease=lease,
                health=upstream.health,
                counter=upstream.tokens.counter(max(shape.sequences, 1)),
                gap=self._gaps[decision.server],
                timeouts=self._timeouts,
                clock=self._clock,
                own_headers=own(inbound.request_id, decision),
            )
            verdict = await self._exchange(inbound, upstream, context, client, outlet)
            outcome = verdict.outcome
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_DISCONNECT
            raise
        finally:
            lease.release(outcome, self._clock())
        return verdict

    async def _exchange(
        self,
        inbound: Inbound,
        upstream: Upstream,
        context: Context,
        client: Client,
        outlet: Outlet,
    ) -> Verdict:
        name = upstream.spec.name
        for fresh in (False, True):
            try:
                connection = await upstream.pool.connection(fresh=fresh)
            except ExhaustedError as error:
                return Verdict(Outcome.REJECTED, reply=errors.exhausted(), error=str(error))
            except ConnectError as error:
                upstream.failed(self._clock(), error)
                return Verdict(
                    Outcome.UPSTREAM_ERROR,
                    reply=errors.upstream_unreachable(name),
                    refused_connection=True,
                    error=str(error),
                )
            if client.gone:
                upstream.pool.put(connection)
                return Verdict(Outcome.CLIENT_DISCONNECT)
            exchange = Exchange(context, outlet, connection)
            await self._run(exchange, connection, inbound, upstream, client, outlet)
            if exchange.failure is not None:
                upstream.failed(self._clock(), exchange.failure)
            if fresh or not _was_stale(exchange, connection, inbound.method):
                return _verdict(exchange, context)
        raise AssertionError("unreachable")

    async def _run(
        self,
        exchange: Exchange,
        connection: Connection,
        inbound: Inbound,
        upstream: Upstream,
        client: Client,
        outlet: Outlet,
    ) -> None:
        """Send, and wait until the response is over. Leaves nothing behind, even if cancelled."""
        rid, body = _with_rid(inbound)
        headers = [*inbound.headers, (REQUEST_ID, inbound.request_id.encode("ascii"))]
        target = upstream.pool.base_path + inbound.target
        head = encode_head(inbound.method, target, upstream.pool.host, headers, len(body))
        client.on_gone = exchange.client_gone
        self._open.add(exchange)
        try:
            connection.start(exchange, head, body, head_request=inbound.method == "HEAD")
            await exchange.done
            await outlet.flush()
        finally:
            self._open.discard(exchange)
            client.on_gone = None
            exchange.client_gone()  # nothing happens if it is over
            given_up = exchange.outcome in (Outcome.CLIENT_DISCONNECT, Outcome.TIMEOUT)
            if rid is not None and given_up and not exchange.complete:
                authorization = first(inbound.headers, b"authorization")
                self.aborter.abort(upstream.pool, upstream.spec.name, rid, authorization)


def _with_rid(inbound: Inbound) -> tuple[str | None, bytes]:
    """Return the id that this attempt can be aborted by, and the body that carries it.

    Ids have one length, because an engine aborts whatever begins with the id that it is given.
    """
    key = inbound.route.rid_key
    if key is None or not inbound.peek.abortable:
        return None, inbound.body
    rid = token_hex(16)
    if key == "request_id":
        rid = f"resp_{rid}"  # it becomes the id of the response object
    return rid, splice(inbound.body, key, rid)


def _was_stale(exchange: Exchange, connection: Connection, method: str) -> bool:
    """Whether a reused connection died without a byte, under what may be sent again."""
    return (
        method in _IDEMPOTENT
        and connection.reused
        and not connection.answered
        and isinstance(exchange.failure, ConnectionBroken)
    )


def _verdict(exchange: Exchange, context: Context) -> Verdict:
    context.counter.finish()
    return Verdict(
        outcome=exchange.outcome,
        reply=exchange.reply,
        status=exchange.status,
        broken=exchange.broken,
        streams=exchange.streams,
        error=exchange.error,
        first_token_at=context.lease.first_token_at,
        output_tokens=round(context.counter.tokens),
        tokens_exact=context.counter.exact,
    )
