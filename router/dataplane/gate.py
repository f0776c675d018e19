"""The way in: a request gets a server, or waits for room, or is turned away; and may come again.

As long as nothing waits a request costs one decision here. Who waits is woken when a lease leaves
prefill or is released, and at each sweep, because a server may have come up or a limit may have
been raised. Nobody has a task, a timer or a future while it waits.

A request may come a second time, to another server, if nothing can have been generated for it: the
first took no connection, or refused it (429 or 503) before the client was sent anything. A refusal
takes from a budget, because the other server is likely to be as full. A connection that failed does
not: it has cost no engine anything. What the first server said is kept, and is the answer if no
other can take the request.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.core.admission import Lifetime, Line, Waited
from router.core.ledger import Ledger
from router.core.retry_budget import RetryBudget
from router.core.steering import Steering
from router.core.types import Decision
from router.dataplane import errors
from router.dataplane.attempt import Attempt, Inbound
from router.dataplane.call import Call, Waiting
from router.dataplane.errors import ErrorReply
from router.dataplane.record import Refusal
from router.dataplane.server import Upstream
from router.settings import Admission

Admit = Callable[[Call, Inbound, Decision], None]

# So many are looked at in a row for whom there is no room.
_LOOK_MAX = 32


class Gate:
    """Lets requests in: `admit` starts an attempt at the server of a decision."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        steering: Steering,
        ledger: Ledger,
        admission: Admission,
        admit: Admit,
        clock: Callable[[], float],
    ) -> None:
        self._upstreams = upstreams
        self._steering = steering
        self._ledger = ledger
        self._admit = admit
        self._clock = clock
        self._line: Line[Call] = Line(admission.queue_max)
        self._timeout_s = admission.queue_timeout_s
        self._budget = RetryBudget(admission.retry_share)
        self._lifetime = Lifetime()
        self._wake_due = False
        self.retries_denied = 0
        self._apply(admission)

    @property
    def line(self) -> Line[Call]:
        """Who waits."""
        return self._line

    def configure(self, admission: Admission) -> None:
        """Change the limits. Who waits already goes on waiting, the new time from its beginning."""
        self._apply(admission)
        self.wake()

    def come(self, call: Call, inbound: Inbound) -> None:
        """Take a new request."""
        self._budget.request(call.arrived)
        self._enter(call, inbound)

    def come_again(self, call: Call, attempt: Attempt) -> bool:
        """Take a request again after an attempt; False if it may not be sent a second time."""
        refusal = attempt.refusal
        if refusal is None or call.pinned or call.cycle.started or call.record.retry is not None:
            return False
        if not self._steering.serves({*call.refused, attempt.server}):
            return False
        if refusal is Refusal.OVERLOAD and not self._budget.take(self._clock()):
            self.retries_denied += 1
            return False
        call.keep(attempt)
        self._enter(call, attempt.inbound)
        return True

    def leave(self, call: Call, waited: Waited = Waited.CLIENT_LEFT) -> None:
        """Let a call wait no longer, if it does."""
        waiting, call.waiting = call.waiting, None
        if waiting is None:
            return
        self._line.leave(call)
        if not self._line:
            self._ledger.on_room = None
        record = call.record
        record.waited = waited
        record.queue_s = (record.queue_s or 0.0) + self._clock() - waiting.since

    def wake(self) -> None:
        """Look soon whether there is room for those who wait."""
        if not self._wake_due:
            self._wake_due = True
            asyncio.get_running_loop().call_soon(self._serve_waiting)

    def sweep(self, now: float) -> None:
        """Turn away who has waited too long; serve who can be. Called about once a second."""
        if self._steering.limits is not None:
            self._observe(now)
        if self._line:
            for call in self._line.overdue(now - self._timeout_s):
                self.leave(call, Waited.TIMEOUT)
                if self._steering.serves(call.refused):
                    wait_s = self._retry_after_s(call, now)
                    self._turn_away(call, errors.queue_timeout(self._timeout_s, wait_s))
                else:
                    self._turn_away(call, self._nobody(call))
            self._serve_waiting()

    def _apply(self, admission: Admission) -> None:
        limits = admission.limits
        self._steering.limits = None if limits.endless else limits
        self._steering.slow_start_s = admission.slow_start_s
        for upstream in self._upstreams:
            upstream.health.breaker.failures_max = admission.breaker_failures
        self._line.size_max = admission.queue_max
        self._timeout_s = admission.queue_timeout_s
        self._budget.share = admission.retry_share

    def _enter(self, call: Call, inbound: Inbound) -> None:
        record, shape = call.record, inbound.peek.shape
        began = self._clock()
        decision = None
        if not (self._line and shape.sequences and self._line.holds_back(record.priority)):
            decision = self._steering.decide(shape, began, call.refused, call.why)
        record.decision_s += self._clock() - began
        if decision is not None:
            self._admit(call, inbound, decision)
        elif self._steering.serves(call.refused):
            self._wait(call, inbound, began)
        else:
            self._turn_away(call, self._nobody(call))

    def _wait(self, call: Call, inbound: Inbound, now: float) -> None:
        record = call.record
        sequences = inbound.peek.shape.sequences
        call.waiting = Waiting(inbound, now)
        self._ledger.on_room = self.wake
        if (head := self._line.head()) is not None and head.refused:
            self.wake()  # it may hold a place free for another server only
        gives_way = self._line.join(call, record.priority, sequences, now)
        if gives_way is None:
            return
        shed = gives_way is not call
        wait_s = self._retry_after_s(gives_way, now)
        self.leave(gives_way, Waited.SHED if shed else Waited.FULL)
        self._turn_away(gives_way, (errors.queue_shed if shed else errors.queue_full)(wait_s))

    def _nobody(self, call: Call) -> ErrorReply:
        """Return why no server takes a request."""
        held_back = self._steering.held_back(call.refused)
        if held_back:
            return errors.drained(held_back)
        if call.why is None:
            return errors.no_server()
        names = (upstream.spec.name for upstream in self._upstreams)
        return errors.target_down([name for name in names if name not in call.refused])

    def _turn_away(self, call: Call, reply: ErrorReply) -> None:
        if not call.answer_kept():
            call.answer(reply)

    def _serve_waiting(self) -> None:
        """Serve the line from its head, as far as there is room.

        Who may go to some servers only does not hold up those behind it; anyone else does.
        """
        self._wake_due = False
        again = True
        while again:
            again = False
            for call in self._line.first(_LOOK_MAX):
                if self._serve(call):
                    again = True
                elif not call.refused:
                    return

    def _serve(self, call: Call) -> bool:
        """Let a call in that waits; False if there is still no room for it."""
        waiting = call.waiting
        if waiting is None:
            return True
        inbound = waiting.inbound
        try:
            shape, now = inbound.peek.shape, self._clock()
            decision = self._steering.decide(shape, now, call.refused, call.why)
            if decision is None:
                return False
            self.leave(call, Waited.SERVED)
            self._admit(call, inbound, decision)
        except Exception as error:  # noqa: BLE001  (those behind it are not to blame)
            self.leave(call, Waited.TURNED_AWAY)
            call.fail(error)
        return True

    def _retry_after_s(self, call: Call, now: float) -> int:
        self._observe(now)
        in_flight = sum(load.sequences for load in self._ledger.loads())
        before = self._line.sequences_before(call.record.priority)
        return self._lifetime.retry_after_s(before, in_flight)

    def _observe(self, now: float) -> None:
        totals = [self._ledger.totals(each.spec.name, now) for each in self._upstreams]
        sequence_s = sum(total.sequence_s for total in totals)
        self._lifetime.observe(now, sequence_s, sum(total.ended_sequences for total in totals))
