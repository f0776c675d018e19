"""Runs an engine model on the wall clock, `clock` times as fast as model time.

One step is one callback: it applies the step, hands each reply its tokens, and starts the next step
at the time that the model says this one ended, not at the time that the callback came, so that late
callbacks do not add up. What cannot be made up is counted: when a callback is more than SLIP_S
late, the schedule moves and `slipped_s` grows. A run with `slipped_s` above zero was slower than
its model.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.engine_batch import Sequence, State
from loadtest.engine_model import Engine, QueueFullError, Step, Work
from loadtest.engine_params import Rng
from loadtest.sim_metrics import Metrics
from loadtest.sim_replies import Output, Reply

SLIP_S = 0.1
# SGLang logs and measures its rate every so many decode steps.
RATE_INTERVAL_STEPS = 40


@dataclass(slots=True)
class Lag:
    """How far the process was behind its model: wall seconds by which step callbacks came late."""

    steps: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    slipped_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean lateness of a step."""
        return self.total_s / self.steps if self.steps else 0.0

    def note(self, late_s: float) -> bool:
        """Take one callback's lateness; return whether the schedule has to move."""
        self.steps += 1
        self.total_s += late_s
        self.max_s = max(self.max_s, late_s)
        if late_s <= SLIP_S:
            return False
        self.slipped_s += late_s
        return True


class Driver:
    """One engine, its clock, and the replies that its sequences belong to."""

    def __init__(self, engine: Engine, rng: Rng, clock: float = 1.0) -> None:
        if clock <= 0:
            raise ValueError("the clock must run forward")
        self.engine = engine
        self.metrics = Metrics()
        self.lag = Lag()
        self.clock = clock
        self.by_rid: dict[str, Output] = {}
        self.gen_throughput = 0.0
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._rate_since = (0.0, 0, 0)

    def now(self) -> float:
        """Return model time, in seconds since the start."""
        return (self._loop.time() - self._origin) * self.clock

    def start(self, reply: Reply) -> None:
        """Put a reply's sequences into the engine's queue, or reject the whole reply."""
        for output in reply.outputs:
            try:
                self.engine.submit(output.sequence)
            except QueueFullError:
                self.abort(reply.outputs)
                self.metrics.aborted += 1
                reply.reject()
                return
            self.by_rid[output.ask.rid] = output
        self._wake()

    def abort(self, outputs: Iterable[Output]) -> None:
        """Take sequences out of the engine; their replies end with the reason abort."""
        for output in outputs:
            if self.by_rid.get(output.ask.rid) is output:
                self.engine.abort(output.sequence)
                self.metrics.aborted += 1
                if output.done:
                    self._ended(output.sequence, self.now())

    def abort_matching(self, rid: str, everything: bool = False) -> None:
        """Abort all sequences that `rid` is a prefix of, but as SGLang does, only if it is live."""
        if everything or rid in self.by_rid:
            live = [
                out for out in self.by_rid.values() if everything or out.ask.rid.startswith(rid)
            ]
            self.abort(live)

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        if self._timer is None:
            now = self._loop.time()
            self._rate_since = ((now - self._origin) * self.clock, 0, 0)
            self._begin(now)

    def _begin(self, at: float) -> None:
        duration_s = self.engine.begin()
        if duration_s is None:
            self._timer = None
            self.gen_throughput = 0.0
            return
        self._due = at + duration_s / self.clock
        self._timer = self._loop.call_at(self._due, self._end)

    def _end(self) -> None:
        due, wall = self._due, self._loop.time()
        slipped = self.lag.note(max(0.0, wall - due))
        at = wall if slipped else due
        now = (at - self._origin) * self.clock
        self._deliver(self.engine.end(self._rng), now)
        self._begin(at)

    def _deliver(self, step: Step, now: float) -> None:
        metrics = self.metrics
        for sequence, tokens in step.emitted:
            output: Output = sequence.key  # type: ignore[assignment]
            if output.last_at is None:
                # A step that catches up may end, by its schedule, before the request came.
                metrics.ttft_s.observe(max(0.0, now - output.arrived_at))
            else:
                metrics.itl_s.observe((now - output.last_at) / tokens, tokens)
            output.last_at = now
            if sequence.state is State.RUNNING:
                output.reply.progress(output)
        for sequence in step.ended:
            self._ended(sequence, now)
        if step.work is Work.DECODE:
            self._measure_rate(now, sum(tokens for _, tokens in step.emitted))

    def _ended(self, sequence: Sequence, now: float) -> None:
        output: Output = sequence.key  # type: ignore[assignment]
        if self.by_rid.get(output.ask.rid) is not output:
            return
        del self.by_rid[output.ask.rid]
        self.metrics.finished(
            sequence.prompt_tokens,
            sequence.output_tokens,
            sequence.cached_tokens,
            max(0.0, now - output.arrived_at),
        )
        output.reply.progress(output)

    def _measure_rate(self, now: float, tokens: int) -> None:
        since, steps, total = self._rate_since
        steps, total = steps + 1, total + tokens
        if steps >= RATE_INTERVAL_STEPS:
            self.gen_throughput = total / (now - since)
            since, steps, total = now, 0, 0
        self._rate_since = (since, steps, total)
