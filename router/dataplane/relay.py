"""What is done with the requests for an engine, and with those for paths that nobody knows.

One request: classify its path, read its body, pass the gate (gate.py), which decides or lets it
wait, attempt; a server that does not take it is left out, and it comes to the gate again. All of it
runs in the callbacks of the two connections: no task but for a new connection and for what the
router itself has to read.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from router.core.admission import Priority
from router.core.ledger import Ledger
from router.core.steering import Steering
from router.core.types import Decision, Outcome, Reason, RequestShape
from router.dataplane import errors
from router.dataplane.asgi import Headers
from router.dataplane.attempt import Attempt, Attempts, Inbound
from router.dataplane.call import Call
from router.dataplane.cycle import Cycle
from router.dataplane.door import Door
from router.dataplane.errors import ErrorReply, Reply
from router.dataplane.fetch import fetch
from router.dataplane.gate import Gate
from router.dataplane.headers import (
    PRIORITY,
    SESSION,
    TARGET,
    encode_head,
    first,
)
from router.dataplane.paths import (
    Control,
    Inference,
    ServerInfo,
    StoredResponse,
    Unknown,
    classify,
)
from router.dataplane.peek import peek
from router.dataplane.record import Observer, Refusal
from router.dataplane.redact import redact
from router.dataplane.server import Upstream
from router.dataplane.stored import Found, StoredResponses
from router.dataplane.targets import meant, words
from router.dataplane.upstream import ExhaustedError, Pool, UpstreamError
from router.settings import Admission, Timeouts

_INFO_BYTES_MAX = 16 * 2**20
_CONTROL = Inference("control")
_NO_LOAD = RequestShape(sequences=0)
# What is done with a request once it is known which server holds the response that it is about.
AtHolder = Callable[[Call, Inbound, str, str], None]
_PRIORITIES = {priority.encode("ascii"): priority for priority in Priority}


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What bounds a request, and what it may ask for.

    `sweep_s` is how often timeouts are looked at: they are late by up to that. `allow_target`:
    clients may name a server.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    body_bytes: int = 64 * 2**20
    sweep_s: float = 1.0
    admission: Admission = field(default_factory=Admission)
    allow_target: bool = False


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
        door: Door | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.clock = clock
        self._allow_target = limits.allow_target
        self.body_bytes_max = limits.body_bytes
        self.idle_s = limits.timeouts.idle_s
        self._sweep_s = limits.sweep_s
        self._upstreams = {upstream.spec.name: upstream for upstream in upstreams}
        self._steering = steering
        self._observer = observer
        self.door = door or Door()
        self._calls: set[Call] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.attempts = Attempts(
            self._upstreams,
            ledger,
            limits.timeouts,
            {name: observer.gap_observer(name) for name in self._upstreams},
            clock,
        )
        self._stored = StoredResponses(self._upstreams, clock)
        self.gate = Gate(upstreams, steering, ledger, limits.admission, self._attempt, clock)

    @property
    def calls(self) -> Collection[Call]:
        """Requests under way."""
        return self._calls

    @property
    def pools(self) -> Iterable[Pool]:
        """The connections to all servers."""
        return (upstream.pool for upstream in self._upstreams.values())

    def configure(self, limits: RelayLimits) -> None:
        """Change the limits, those of requests under way too; the sweep stays as it is."""
        self.body_bytes_max = limits.body_bytes
        self.idle_s = limits.timeouts.idle_s
        self.attempts.timeouts = limits.timeouts
        self.gate.configure(limits.admission)
        self._allow_target = limits.allow_target

    def cut_short(self) -> None:
        """End what is under way, with an error."""
        for call in tuple(self._calls):
            call.shut_down()

    def hurry(self) -> None:
        """End what is under way, and wait for no engine to hear of it."""
        self.cut_short()
        self.attempts.aborter.hurry()

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def aclose(self) -> None:
        """Stop sweeping, end what is under way, let aborts go out, close idle connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        self.cut_short()
        await self.attempts.aborter.aclose()
        for pool in self.pools:
            pool.close()

    def open(self, cycle: Cycle) -> Call:
        """Return the call of a request whose head has come."""
        return Call(self, cycle, classify(cycle.method, cycle.path), self.door.reply(cycle))

    # The call's side.

    def opened(self, call: Call) -> None:
        """Take note of a call that has begun."""
        self._calls.add(call)

    def serve(self, call: Call) -> None:
        """Do what the request asks for: it is complete."""
        route = call.route
        match route:
            case Inference():
                self._steer(call, route)
            case StoredResponse(response_id=response_id, route=stored):
                self._at_holder(call, self._inbound(call, stored), response_id, self._look_up)
            case ServerInfo():
                self._describe(call)
            case Control():
                self._control(call, route)
            case Unknown(allow=allow):
                call.answer(errors.method_not_allowed(allow) if allow else errors.not_found())

    def attempted(self, call: Call, attempt: Attempt) -> None:
        """Go on after an attempt: try another server, or end the response."""
        if attempt.response_id is not None and attempt.outcome is Outcome.OK:
            self._stored.seen(attempt.response_id, attempt.server)
        if self.gate.come_again(call, attempt):
            return
        if attempt.refusal is Refusal.CONNECT and call.answer_kept():
            return
        if attempt.reply is not None:
            call.answer(attempt.reply)
        elif attempt.broken:
            call.break_off(attempt.last)
        else:
            call.cycle.end()

    def waits_no_more(self, call: Call) -> None:
        """Take a call out of the queue: its client has left, or the router stops."""
        self.gate.leave(call)

    def ended(self, call: Call) -> None:
        """Take the record of an ended call."""
        self._calls.discard(call)
        self._observer.finished(call.record)

    def _inbound(self, call: Call, route: Inference) -> Inbound:
        body = call.body
        facts = peek(body, route, first(call.cycle.headers, SESSION))
        record = call.record
        record.streaming = facts.stream
        record.sequences = facts.shape.sequences
        record.prompt_tokens = facts.shape.prompt_tokens
        headers = self.door.forwarded(call.cycle.headers)
        admin = route is _CONTROL
        return Inbound(call.cycle, headers, body, route, facts, record.request_id, admin)

    def _steer(self, call: Call, route: Inference) -> None:
        """Take the request to the gate, in its class."""
        word = first(call.cycle.headers, PRIORITY)
        if word is not None:
            priority = _PRIORITIES.get(word)
            if priority is None:
                call.answer(errors.priority_unknown(Priority))
                return
            call.record.priority = priority
        refusal = self._aim(call)
        if refusal is not None:
            call.answer(refusal)
            return
        inbound = self._inbound(call, route)
        continues = inbound.peek.continues
        target = self._drained_target(call)
        if continues is not None:
            self._at_holder(call, inbound, continues, self._go_on)
        elif target is not None:
            call.pinned = True
            self._attempt(call, inbound, Decision(target, Reason.TARGET))
        else:
            self.gate.come(call, inbound)

    def _aim(self, call: Call) -> ErrorReply | None:
        """Confine the request to what its target header names, or return why that is wrong."""
        word = first(call.cycle.headers, TARGET)
        if word is None:
            return None
        if not (self._allow_target or self.door.guard.is_admin(call.cycle.headers)):
            return errors.target_refused()
        specs = [upstream.spec for upstream in self._upstreams.values()]
        names = meant(word.decode("latin-1"), specs)
        if not names:
            return errors.target_unknown(words(specs))
        call.refused.update(self._upstreams.keys() - names)
        call.why = Reason.TARGET
        return None

    def _drained_target(self, call: Call) -> str | None:
        """Return the drained server that the operator names, to try it before it is back."""
        name = self._named(call) if call.why is Reason.TARGET else None
        if name not in self._steering.drained or not self.door.guard.is_admin(call.cycle.headers):
            return None
        return name

    def _at_holder(self, call: Call, inbound: Inbound, response_id: str, then: AtHolder) -> None:
        """Go on at the server that holds a stored response."""
        server = self._stored.server_of(response_id)
        if server is not None:
            then(call, inbound, response_id, server)
            return

        def found(found: Found) -> None:
            if found.server is None:
                call.answer(errors.response_unknown(response_id, found.silent))
            else:
                then(call, inbound, response_id, found.server)

        call.wait_then(self._stored.find(response_id, inbound.headers), found)

    def _look_up(self, call: Call, inbound: Inbound, _response_id: str, server: str) -> None:
        """Read or cancel a response: no work for an engine, so drained ones do it too."""
        call.pinned = True
        self._attempt(call, inbound, Decision(server, Reason.STORED))

    def _go_on(self, call: Call, inbound: Inbound, response_id: str, server: str) -> None:
        """Generate what goes on from a response."""
        if server in call.refused:
            call.answer(errors.response_elsewhere(response_id, server))
            return
        call.refused.update(self._upstreams.keys() - {server})
        call.why = Reason.STORED
        self.gate.come(call, inbound)

    def _attempt(self, call: Call, inbound: Inbound, decision: Decision) -> None:
        record = call.record
        record.server = decision.server
        record.role = self._upstreams[decision.server].spec.role
        record.reason = decision.reason
        record.attempts += 1
        call.decision = decision
        again = record.attempts > 1
        call.attempt = self.attempts.make(inbound, decision, call.attempted, again=again)
        call.attempt.start()

    def _control(self, call: Call, route: Control) -> None:
        """Relay a control path to the server that the caller named: which one is never guessed."""
        guard = self.door.guard
        if route.disguised or not guard.is_admin(call.cycle.headers):
            call.answer(errors.control_refused(has_key=guard.has_admin))
            return
        name = self._named(call)
        if name is None:
            call.answer(errors.target_needed(self._upstreams))
            return
        call.pinned = True
        self._attempt(call, self._inbound(call, _CONTROL), Decision(name, Reason.FIXED))

    def _describe(self, call: Call) -> None:
        """Relay what a server says of itself, without its keys."""
        name = self._named(call)
        decision = Decision(name, Reason.FIXED) if name is not None else None
        if decision is None and first(call.cycle.headers, TARGET) is not None:
            call.answer(errors.target_needed(self._upstreams))
            return
        decision = decision or self._steering.decide(_NO_LOAD, self.clock())
        if decision is None:
            call.answer(errors.no_server())
            return
        call.record.server = decision.server
        call.decision = decision
        call.wait_for(self._description(call, self._upstreams[decision.server]))

    async def _description(self, call: Call, upstream: Upstream) -> Reply:
        server, pool = upstream.spec.name, upstream.pool
        target = pool.base_path + call.cycle.target
        headers = upstream.credentials.put_on(self.door.forwarded(call.cycle.headers))
        head = encode_head("GET", target, pool.host, headers, 0)
        limit_s = self.attempts.timeouts.first_byte_s
        try:
            fetched = await fetch(pool, head, timeout_s=limit_s, limit_bytes=_INFO_BYTES_MAX)
        except TimeoutError:
            return errors.first_byte_timeout(server, limit_s)
        except ExhaustedError as error:
            call.record.error = str(error)
            return errors.exhausted()
        except UpstreamError as error:
            upstream.failed(self.clock(), error)
            call.record.error = str(error)
            return errors.upstream_unreachable(server)
        safe = redact(fetched.body)
        if safe is None:
            return errors.upstream_unreadable(server)
        return _Described(fetched.status, safe)

    def _named(self, call: Call) -> str | None:
        """Return the server that the request names; a lone server needs no naming."""
        target = first(call.cycle.headers, TARGET)
        if target is None:
            return next(iter(self._upstreams)) if len(self._upstreams) == 1 else None
        name = target.decode("latin-1")
        return name if name in self._upstreams else None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            now = self.clock()
            for call in tuple(self._calls):
                call.expire(now)
            self.attempts.sweep(now)
            self.gate.sweep(now)


@dataclass(frozen=True, slots=True)
class _Described:
    status: int
    data: bytes

    def body(self) -> bytes:
        return self.data

    def headers(self) -> Headers:
        return [(b"content-type", b"application/json")]
