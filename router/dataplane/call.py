"""One request in the relay's hands, from its head to its record: what comes to it, and its ends.

    QUEUED --its turn--> READING --complete--> SERVED --response handed over--> ENDED

What is to be done with it is the relay's to say. However it ends, it ends in exactly one record.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from router.core.types import Decision, Outcome, Reason
from router.dataplane import errors
from router.dataplane.attempt import Attempt, Inbound
from router.dataplane.cycle import Cycle
from router.dataplane.errors import ErrorReply, Reply
from router.dataplane.headers import DO_NOT_RETRY, first, own, request_id
from router.dataplane.paths import Control, Inference, Route
from router.dataplane.record import RequestRecord

logger = logging.getLogger(__name__)

_CLIENT_LEFT = 499

T = TypeVar("T")


class Host(Protocol):
    """Who says what is to be done with a call: the relay."""

    clock: Callable[[], float]
    body_bytes_max: int
    idle_s: float

    def opened(self, call: "Call") -> None:
        """Take note that a call has begun."""
        ...

    def serve(self, call: "Call") -> None:
        """Do what the request asks for: it is complete."""
        ...

    def attempted(self, call: "Call", attempt: Attempt) -> None:
        """Go on after an attempt that is over."""
        ...

    def waits_no_more(self, call: "Call") -> None:
        """Take note that a call that waits for room is given up."""
        ...

    def ended(self, call: "Call") -> None:
        """Take the record of an ended call."""
        ...


class Waiting(NamedTuple):
    """What a call that waits for room is to send, and since when it waits."""

    inbound: Inbound
    since: float


class _Kept(NamedTuple):
    """What the first attempt came to, in case that there is no better answer."""

    reply: Reply
    decision: Decision | None
    outcome: Outcome
    error: str | None


class _Stage(Enum):
    QUEUED = auto()
    READING = auto()
    SERVED = auto()
    ENDED = auto()


_BEFORE = (_Stage.QUEUED, _Stage.READING)


class Call:
    """One request, and what is learnt of it.

    `refused` are servers that it may not be sent to (again), `why` the reason if that is not only
    because they have failed; `pinned`: it may go to one only.
    `at_once` is the answer if the head alone has settled it.
    """

    __slots__ = (
        "_at_once", "_body", "_host", "_kept", "_read_at", "_size_bytes", "_stage", "_stalled_at",
        "_task", "arrived", "attempt", "cycle", "decision", "pinned", "record", "refused", "route",
        "waiting", "why",
    )  # fmt: skip

    def __init__(
        self, host: Host, cycle: Cycle, route: Route, at_once: Reply | None = None
    ) -> None:
        self._host = host
        self._stage = _Stage.QUEUED
        self._body: bytes | bytearray = b""
        self._size_bytes = 0
        self._stalled_at: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self.cycle = cycle
        self.route = route
        self._at_once = at_once
        self.arrived = self._read_at = host.clock()
        self.record = RequestRecord(request_id(cycle.headers), route.endpoint)
        self.decision: Decision | None = None
        self.attempt: Attempt | None = None
        self.refused: set[str] = set()
        self.pinned = False
        self.why: Reason | None = None
        self.waiting: Waiting | None = None
        self._kept: _Kept | None = None

    # The client's side.

    def begin(self) -> None:
        """Start: ask for the body if the client waits for that, or act if it is there."""
        self._stage = _Stage.READING
        self._host.opened(self)
        declared = first(self.cycle.headers, b"content-length")
        if declared is not None and int(declared) > self._host.body_bytes_max:
            self._size_bytes = int(declared)
        if self._at_once is not None and self._announces_body(declared):
            self.answer(self._at_once)
        elif self._size_bytes > self._host.body_bytes_max:
            self.answer(errors.body_too_large(self._host.body_bytes_max))
        elif self.cycle.received:
            self.received()
        elif self.cycle.expects:
            if isinstance(self.route, Inference | Control):
                self.cycle.go_on()
            else:
                self.received()

    def feed(self, data: bytes) -> None:
        """Keep bytes of the body, within the limit."""
        if self._stage not in _BEFORE or self._at_once is not None:
            return
        self._read_at = self._host.clock()
        self._size_bytes += len(data)
        if self._size_bytes <= self._host.body_bytes_max:
            if not self._body:
                self._body = data
                return
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data  # in place: chunks of two bytes may be millions
            return
        self._body = b""
        if self._stage is _Stage.READING:
            self.answer(errors.body_too_large(self._host.body_bytes_max))

    def received(self) -> None:
        """Act."""
        if self._stage is _Stage.READING:
            self._stage = _Stage.SERVED
            try:
                if self._at_once is not None:
                    self.answer(self._at_once)
                else:
                    self._host.serve(self)
            except Exception as error:  # noqa: BLE001  (whatever it is, the client gets an answer)
                self.fail(error)

    def malformed(self) -> bool:
        """Refuse a body that is none; False if the request is being served already."""
        if self._stage is not _Stage.READING:
            return False
        self.answer(errors.body_malformed())
        return True

    def pause(self) -> None:
        """The client does not read: hold the engine back."""
        self._stalled_at = self._host.clock()
        if self.attempt is not None:
            self.attempt.pause()

    def resume(self) -> None:
        """The client reads."""
        self._stalled_at = None
        if self.attempt is not None:
            self.attempt.resume()

    def sent(self) -> None:
        """End: the response is handed over."""
        self._end()

    def client_gone(self) -> None:
        """End early: nobody is left to read."""
        self._abandon(Outcome.CLIENT_DISCONNECT)
        self._end()

    # The relay's side.

    @property
    def body(self) -> bytes:
        """The request's body."""
        self._body = bytes(self._body)
        return self._body

    def attempted(self, attempt: Attempt) -> None:
        """Take the result of an attempt, and let the relay go on."""
        self.attempt = None
        self._conclude(attempt)
        try:
            self._host.attempted(self, attempt)
        except Exception as error:  # noqa: BLE001  (whatever it is, the client gets an answer)
            self.fail(error)

    def keep(self, attempt: Attempt) -> None:
        """Keep an attempt's result, and go on to another server."""
        self.refused.add(attempt.server)
        self.record.retry = attempt.refusal
        if attempt.reply is not None:
            self._kept = _Kept(attempt.reply, self.decision, attempt.outcome, attempt.error)

    def answer_kept(self) -> bool:
        """Answer as the first attempt was, if one was kept."""
        if self._kept is None:
            return False
        reply, self.decision, outcome, error = self._kept
        if self.decision is not None:
            self.record.server = self.decision.server
        self.record.outcome = outcome
        self.record.error = error
        self.answer(reply)
        return True

    def wait_for(self, reply: Coroutine[Any, Any, Reply]) -> None:
        """Answer with a reply that takes a while."""
        self.wait_then(reply, self.answer)

    def wait_then(self, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> None:
        """Go on with what takes a while to find out, unless the client leaves before."""
        task = asyncio.get_running_loop().create_task(work)
        self._task = task
        task.add_done_callback(partial(self._waited, then))

    def answer(self, reply: Reply) -> None:
        """Send a whole response."""
        self._stage = _Stage.SERVED
        record = self.record
        record.status = reply.status
        if isinstance(reply, ErrorReply):
            record.outcome = reply.outcome
            record.error = record.error or reply.message
        body = reply.body()
        length = (b"content-length", b"%d" % len(body))
        headers = [*reply.headers(), length, *own(record.request_id, self.decision)]
        if record.attempts > 1 and reply.status >= 400:
            headers.append(DO_NOT_RETRY)
        self.cycle.answer(reply.status, headers, body)

    def break_off(self, last: bytes = b"") -> None:
        """Cut the response short, `last` before that."""
        self._end()
        self.cycle.break_off(last)

    def expire(self, now: float) -> None:
        """Give up a client that stands still for too long. Called about once a second."""
        idle_s = self._host.idle_s
        if self._stalled_at is not None:
            if now - self._stalled_at > idle_s:
                self._abandon(Outcome.CLIENT_DISCONNECT)
                self.record.error = "the client stopped reading"
                self._end()
                self.cycle.abandon()
        elif self._stage is _Stage.READING:
            if now - self._read_at > idle_s:
                self.answer(errors.body_stalled(idle_s))
        elif self.attempt is not None:
            self.attempt.expire(now)

    def shut_down(self) -> None:
        """End early because the router does, as well as that is still possible."""
        if self._stage is _Stage.ENDED or self.cycle.response_complete:
            return
        reply = errors.shutting_down()
        last = b"" if self.attempt is None else self.attempt.last_words(reply)
        self._abandon(Outcome.TRUNCATED if self.cycle.started else reply.outcome)
        self.record.error = "cut short by the router's shutdown"
        self._cut_short(reply, last)

    def fail(self, error: Exception) -> None:
        """Answer for a fault of the router."""
        logger.error("request %s failed inside the router", self.record.request_id, exc_info=error)
        self._abandon(Outcome.UPSTREAM_ERROR)
        self.record.error = "internal error"
        self._cut_short(errors.internal())

    def _announces_body(self, declared: bytes | None) -> bool:
        """Whether more is to come than a head: if not, its end is, at once."""
        if declared is not None:
            return int(declared) > 0
        return first(self.cycle.headers, b"transfer-encoding") is not None

    def _cut_short(self, reply: ErrorReply, last: bytes = b"") -> None:
        if self.cycle.started:
            self.break_off(last)
        else:
            self.answer(reply)

    def _waited(self, then: Callable[[T], None], task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled() or self._stage is _Stage.ENDED:
            return
        try:
            then(task.result())
        except Exception as error:  # noqa: BLE001  (whatever it is, the client gets an answer)
            self.fail(error)

    def _abandon(self, outcome: Outcome) -> None:
        self.record.outcome = outcome
        if self._task is not None:
            self._task.cancel()
        if self.waiting is not None:
            self._host.waits_no_more(self)
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.abandon(outcome)
            self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        record = self.record
        record.outcome = attempt.outcome
        record.error = attempt.error
        record.status = attempt.status or 0
        record.streaming = record.streaming or attempt.streams
        record.output_tokens = round(attempt.counter.tokens)
        record.tokens_exact = attempt.counter.exact
        if attempt.first_token_at is not None:
            record.ttft_s = attempt.first_token_at - self.arrived

    def _end(self) -> None:
        if self._stage is _Stage.ENDED:
            return
        self._stage = _Stage.ENDED
        self._body = b""
        record = self.record
        record.duration_s = self._host.clock() - self.arrived
        record.status = record.status or _CLIENT_LEFT
        try:
            self._host.ended(self)
        except Exception:
            logger.exception("the end of request %s was not recorded", record.request_id)
