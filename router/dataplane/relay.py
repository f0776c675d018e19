"""The ASGI application for all that concerns an engine, and for all that nobody knows.

One request: classify its path, read its body, decide, attempt; a server that refuses the connection
is left out and the decision made again. Every request ends in exactly one record, whatever happens.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol
from urllib.parse import quote

from router.core.ledger import Ledger
from router.core.steering import Steering
from router.core.types import Decision, Outcome, Reason, RequestShape
from router.dataplane import errors
from router.dataplane.asgi import Headers, Receive, Scope, Send
from router.dataplane.attempt import Attempts, Inbound, Verdict
from router.dataplane.client import BodyStalledError, BodyTooLargeError, Client, ClientGoneError
from router.dataplane.errors import BrokenResponse, ErrorReply
from router.dataplane.fetch import fetch
from router.dataplane.headers import (
    TARGET,
    encode_head,
    first,
    forwarded_request,
    has_bearer,
    own,
    request_id,
)
from router.dataplane.outlet import Outlet
from router.dataplane.paths import Control, Inference, Route, ServerInfo, Unknown, classify
from router.dataplane.peek import peek
from router.dataplane.record import Observer, RequestRecord
from router.dataplane.redact import redact
from router.dataplane.upstream import ExhaustedError, Upstream, UpstreamError
from router.settings import Timeouts

logger = logging.getLogger(__name__)

_CLIENT_LEFT = 499
_INFO_BYTES_MAX = 16 * 2**20
_CONTROL = Inference("control")
_NO_LOAD = RequestShape(sequences=0)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What bounds a request.

    `sweep_s` is how often timeouts are looked at: they are late by up to that.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    body_bytes: int = 64 * 2**20
    sweep_s: float = 1.0


class Relay:
    """Steers and relays requests. `start` once the event loop runs, `aclose` before it stops."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        steering: Steering,
        ledger: Ledger,
        observer: Observer,
        limits: RelayLimits,
        *,
        admin_key: str | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._limits = limits
        self._upstreams = {upstream.spec.name: upstream for upstream in upstreams}
        self._steering = steering
        self._observer = observer
        self._admin_key = admin_key
        self._clock = clock
        self._sweeper: asyncio.Task[None] | None = None
        self.attempts = Attempts(
            self._upstreams,
            ledger,
            self._limits.timeouts,
            {name: observer.gap_observer(name) for name in self._upstreams},
            clock,
        )

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def aclose(self) -> None:
        """Stop sweeping, let aborts go out, close idle connections.

        Requests under way are the server's to end.
        """
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        await self.attempts.aborter.aclose()
        for upstream in self._upstreams.values():
            upstream.pool.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        call = _Call(scope, receive, send, self._clock)
        route = classify(scope["method"], call.path)
        record = call.record
        record.endpoint = route.endpoint
        try:
            reply = await self._serve(route, call)
            if reply is not None:
                await call.answer(reply)
        except ClientGoneError:
            record.outcome = Outcome.CLIENT_DISCONNECT
        except asyncio.CancelledError:
            # The server gives up what is left at its shutdown: nobody else cancels a request.
            await call.shut_down()
        except BrokenResponse:
            raise
        except Exception:
            logger.exception("request %s failed inside the router", record.request_id)
            await call.fail()
        finally:
            call.client.close()
            record.duration_s = self._clock() - call.arrived
            record.status = record.status or _CLIENT_LEFT
            self._observer.finished(record)

    async def _serve(self, route: Route, call: "_Call") -> "Reply | None":
        """Return what is to be answered, None if the answer was given."""
        match route:
            case Inference():
                return await self._relay(route, call)
            case ServerInfo():
                return await self._describe(call)
            case Control():
                return await self._control(route, call)
            case Unknown(allow=allow):
                return errors.method_not_allowed(allow) if allow else errors.not_found()

    async def _relay(self, route: Inference, call: "_Call") -> "Reply | None":
        """Decide and attempt, until a server takes the connection."""
        try:
            inbound = await call.inbound(route, self._limits)
        except (BodyTooLargeError, BodyStalledError) as error:
            return self._refuse_body(error)
        refused: set[str] = set()
        verdict: Verdict | None = None
        while verdict is None or verdict.refused_connection:
            began = self._clock()
            decision = self._steering.decide(inbound.peek.shape, began, refused)
            call.record.decision_s += self._clock() - began
            if decision is None:
                break
            verdict = await self._attempt(call, inbound, decision)
            refused.add(decision.server)
        return verdict.reply if verdict is not None else errors.no_server()

    def _refuse_body(self, error: BodyTooLargeError | BodyStalledError) -> ErrorReply:
        if isinstance(error, BodyTooLargeError):
            return errors.body_too_large(self._limits.body_bytes)
        return errors.body_stalled(self._limits.timeouts.idle_s)

    async def _attempt(self, call: "_Call", inbound: Inbound, decision: Decision) -> Verdict:
        record = call.record
        record.server = decision.server
        record.role = self._upstreams[decision.server].spec.role
        record.reason = decision.reason
        record.attempts += 1
        call.decision = decision
        verdict = await self.attempts.make(inbound, decision, call.client, call.outlet)
        call.conclude(verdict)
        if verdict.broken:
            raise BrokenResponse(verdict.error)
        return verdict

    async def _control(self, route: Control, call: "_Call") -> "Reply | None":
        """Relay a control path to the server that the caller named: which one is never guessed."""
        key = self._admin_key
        if key is None or route.disguised or not has_bearer(call.headers, key):
            return errors.control_refused(has_key=key is not None)
        name = self._named(call)
        if name is None:
            return errors.target_needed(self._upstreams)
        try:
            inbound = await call.inbound(_CONTROL, self._limits)
        except (BodyTooLargeError, BodyStalledError) as error:
            return self._refuse_body(error)
        verdict = await self._attempt(call, inbound, Decision(name, Reason.FIXED))
        return verdict.reply

    async def _describe(self, call: "_Call") -> "Reply":
        """Relay what a server says of itself, without its keys."""
        name = self._named(call)
        decision = Decision(name, Reason.FIXED) if name is not None else None
        if decision is None and first(call.headers, TARGET) is not None:
            return errors.target_needed(self._upstreams)
        decision = decision or self._steering.decide(_NO_LOAD, self._clock())
        if decision is None:
            return errors.no_server()
        call.record.server = decision.server
        call.decision = decision
        upstream = self._upstreams[decision.server]
        pool = upstream.pool
        target = pool.base_path + call.target
        head = encode_head("GET", target, pool.host, forwarded_request(call.headers), 0)
        try:
            fetched = await fetch(
                pool,
                head,
                timeout_s=self._limits.timeouts.first_byte_s,
                limit_bytes=_INFO_BYTES_MAX,
            )
        except TimeoutError:
            limit_s = self._limits.timeouts.first_byte_s
            return errors.first_byte_timeout(decision.server, limit_s)
        except ExhaustedError as error:
            call.record.error = str(error)
            return errors.exhausted()
        except UpstreamError as error:
            upstream.failed(self._clock(), error)
            call.record.error = str(error)
            return errors.upstream_unreachable(decision.server)
        safe = redact(fetched.body)
        if safe is None:
            return errors.upstream_unreadable(decision.server)
        return _Described(fetched.status, safe)

    def _named(self, call: "_Call") -> str | None:
        """Return the server that the request names; a lone server needs no naming."""
        target = first(call.headers, TARGET)
        if target is None:
            return next(iter(self._upstreams)) if len(self._upstreams) == 1 else None
        name = target.decode("latin-1")
        return name if name in self._upstreams else None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            self.attempts.sweep(self._clock())


class Reply(Protocol):
    """A whole response that is not relayed."""

    @property
    def status(self) -> int:
        """Its status."""
        ...

    def body(self) -> bytes:
        """Return its body."""
        ...

    def headers(self) -> Headers:
        """Return its headers, but for the length of the body."""
        ...


@dataclass(frozen=True, slots=True)
class _Described:
    status: int
    data: bytes

    def body(self) -> bytes:
        return self.data

    def headers(self) -> Headers:
        return [(b"content-type", b"application/json")]


class _Call:
    """One request in the relay's hands, and what is learnt of it."""

    __slots__ = (
        "_send", "arrived", "client", "decision", "headers", "method", "outlet", "path", "record",
        "target",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, clock: Callable[[], float]
    ) -> None:
        self._send = send
        self.arrived = clock()
        self.client = Client(receive)
        self.decision: Decision | None = None
        self.headers: Headers = scope["headers"]
        self.method: str = scope["method"]
        self.outlet = Outlet(send, clock)
        raw_path = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
        query = scope["query_string"]
        self.path: str = raw_path.decode("latin-1")
        self.record = RequestRecord(request_id(self.headers), "other")
        self.target: bytes = raw_path + b"?" + query if query else raw_path

    async def inbound(self, route: Inference, limits: RelayLimits) -> Inbound:
        """Read the body and begin to watch the client."""
        length = first(self.headers, b"content-length") or b""
        declared_bytes = int(length) if length.isdigit() else None
        body = await self.client.body(limits.body_bytes, declared_bytes, limits.timeouts.idle_s)
        facts = peek(body, route)
        self.record.streaming = facts.stream
        self.record.sequences = facts.shape.sequences
        self.record.prompt_tokens = facts.shape.prompt_tokens
        self.client.watch()
        headers = forwarded_request(self.headers)
        return Inbound(
            self.method, self.target, headers, body, route, facts, self.record.request_id
        )

    def conclude(self, verdict: Verdict) -> None:
        """Enter what became of an attempt."""
        record = self.record
        record.outcome = verdict.outcome
        record.error = verdict.error
        record.status = verdict.status or 0
        record.streaming = record.streaming or verdict.streams
        record.output_tokens = verdict.output_tokens
        record.tokens_exact = verdict.tokens_exact
        if verdict.first_token_at is not None:
            record.ttft_s = verdict.first_token_at - self.arrived

    async def answer(self, reply: Reply) -> None:
        """Send a whole response."""
        body = reply.body()
        length = (b"content-length", b"%d" % len(body))
        headers = [*reply.headers(), length, *own(self.record.request_id, self.decision)]
        self.record.status = reply.status
        if isinstance(reply, ErrorReply):
            self.record.outcome = reply.outcome
            self.record.error = self.record.error or reply.message
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def shut_down(self) -> None:
        """End early because the router does, as well as that is still possible."""
        self.record.outcome = Outcome.CLIENT_DISCONNECT
        self.record.error = "cut short by the router's shutdown"
        if self.outlet.started or self.record.status:
            raise BrokenResponse(self.record.error)
        await self.answer(errors.shutting_down())

    async def fail(self) -> None:
        """Answer for a fault of the router, as far as that is still possible."""
        self.record.error = None
        if self.outlet.started or self.record.status:
            self.record.outcome = Outcome.UPSTREAM_ERROR
            self.record.error = "internal error"
            raise BrokenResponse("internal error")
        await self.answer(errors.internal())
