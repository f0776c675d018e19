"""A continuous-batching engine in discrete steps. Pure: no clock, and randomness is an argument.

A step is what an engine's scheduler runs at a time: one prefill pass over up to
`prefill_pass_tokens` prompt tokens (a longer prompt is cut into chunks), or one decode step of
every running request. Prefill goes first and blocks decode. `begin` decides what the next step is
and says how long it takes; `end` applies it. Between the two the caller lets that time pass, on a
wall clock or a simulated one, and may submit and abort.

    prefill pass:  prefill_pass_s + prefill_token_s * tokens
    decode step:   step_s(batch) + kv_token_s * (context tokens - batch * REFERENCE_CONTEXT_TOKENS)

KV slots limit admission: a request enters if its prompt and all tokens it may generate fit beside
what the running ones hold and NEW_TOKEN_RATIO of what they may still generate. If a decode step
does not fit all the same, the requests with the fewest output tokens are retracted: back into the
queue, to be prefilled again with what they have generated. Not modelled: prefix cache across
requests, priorities, prefill mixed into decode steps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from loadtest.engine_params import REFERENCE_CONTEXT_TOKENS, DecodeMode, EngineParams, Rng

# The share of the running requests' outstanding tokens that admission keeps free: between the 0.7
# that SGLang's estimate starts from and the 0.1 that it decays to.
NEW_TOKEN_RATIO = 0.4


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence to generate. `key` is the caller's; `cached_tokens` need no prefill."""

    prompt_tokens: int
    max_tokens: int
    key: object = None
    cached_tokens: int = 0
    state: State = State.WAITING
    output_tokens: int = 0
    decode_steps: int = 0
    retractions: int = 0
    # The engine's own: prompt tokens in the cache so far, this request's chances, an abort that
    # waits for the step.
    prefilled_tokens: int = 0
    chances: tuple[float, ...] = ()
    aborting: bool = False

    @property
    def context_tokens(self) -> int:
        """Tokens that attention reads: prompt and output."""
        return self.prompt_tokens + self.output_tokens


class Work(Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has ended. `ended` are the sequences that finished or were aborted in it."""

    work: Work
    duration_s: float
    emitted: list[tuple[Sequence, int]]
    ended: list[Sequence]


class QueueFullError(Exception):
    """The waiting queue is at its limit."""


class Gpu:
    """The GPUs of one or more engines, each at its part of the speed while several have work.

    Two servers on one H200, each against itself alone at the same load, kept 0.45 to 0.64 of their
    rate, 0.53 on average and whatever the other's load: a little more than the half, since one
    computes in the other's gaps.
    """

    CONTENDED_SHARE_OF_TWO = 0.53

    def __init__(self) -> None:
        self._tenants: list[Engine] = []

    def join(self, engine: "Engine") -> None:
        """Add an engine; once each."""
        self._tenants.append(engine)

    def slowdown(self) -> float:
        """Return how much longer a step takes now than on idle GPUs."""
        busy = sum(engine.has_work for engine in self._tenants)
        return busy / (2 * self.CONTENDED_SHARE_OF_TWO) if busy > 1 else 1.0


@dataclass(slots=True)
class Totals:
    """What an engine has done since it started."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_passes: int = 0
    decode_steps: int = 0
    sequence_steps: int = 0
    decoded_tokens: int = 0
    retractions: int = 0


@dataclass(slots=True)
class _Pass:
    """The step under way: the prefill chunks (sequence, tokens), or none for a decode step."""

    duration_s: float
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)


class Engine:
    """The scheduler: a waiting queue, the running batch, the KV slots, and the step under way."""

    def __init__(
        self,
        params: EngineParams,
        gpu: Gpu | None = None,
        *,
        max_running_requests: int | None = None,
        max_queued_requests: int | None = None,
    ) -> None:
        self.params = params
        self.gpu = gpu or Gpu()
        self.gpu.join(self)
        self.max_running_requests = max_running_requests or params.max_running_requests
        self.max_queued_requests = max_queued_requests
        self.totals = Totals()
        self.kv_used_tokens = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._partial: Sequence | None = None
        self._pass: _Pass | None = None

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.running or self.waiting or self._partial or self._pass)

    @property
    def num_running(self) -> int:
        """Sequences that have left the queue: decoding, or in the prefill pass."""
        chunks = len(self._pass.chunks) if self._pass else 0
        return len(self.running) + (chunks or (self._partial is not None))

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence into the queue; raise QueueFullError at its limit."""
        limit = self.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            raise QueueFullError
        if sequence.prompt_tokens + sequence.max_tokens > self.params.context_tokens:
            raise ValueError("a sequence longer than the context")
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence: at once if it waits, with the step under way or the next if it runs."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            sequence.state = State.ABORTED
        elif sequence.state in (State.PREFILL, State.RUNNING):
            sequence.aborting = True

    def begin(self) -> float | None:
        """Start the next step; return its duration in seconds, None if there is nothing to do."""
        if self._pass is not None:
            raise RuntimeError("a step is under way")
        chunks = self._admit() if self.waiting or self._partial else []
        if chunks:
            tokens = sum(tokens for _, tokens in chunks)
            duration_s = self.params.prefill_pass_s + self.params.prefill_token_s * tokens
        elif self.running:
            self._retract_until_the_step_fits()
            duration_s = self._decode_s()
        else:
            return None
        duration_s *= self.gpu.slowdown()
        self._pass = _Pass(duration_s, chunks)
        return duration_s

    def end(self, rng: Rng) -> Step:
        """Apply the step that `begin` started."""
        if self._pass is None:
            raise RuntimeError("no step is under way")
        current, self._pass = self._pass, None
        emitted: list[tuple[Sequence, int]] = []
        ended: list[Sequence] = []
        if current.chunks:
            self._end_prefill(current.chunks, rng, emitted, ended)
            return Step(Work.PREFILL, current.duration_s, emitted, ended)
        self._end_decode(rng, emitted, ended)
        return Step(Work.DECODE, current.duration_s, emitted, ended)

    def _mode(self) -> DecodeMode:
        """Return how the next step decodes. An engine that changes its mode decides here."""
        return self.params.decode

    def _decode_s(self) -> float:
        batch = len(self.running)
        reference_s = self._mode().step_s(batch)
        context = sum(sequence.prompt_tokens + sequence.output_tokens for sequence in self.running)
        extra_s = self.params.kv_token_s * (context - batch * REFERENCE_CONTEXT_TOKENS)
        # A context shorter than the reference saves reading KV, but a step does more than that.
        return max(reference_s + extra_s, reference_s / 2)

    def _admit(self) -> list[tuple[Sequence, int]]:
        """Take sequences off the queue in order, as far as places, KV and the pass's tokens go."""
        params = self.params
        budget = params.prefill_pass_tokens
        chunks: list[tuple[Sequence, int]] = []
        places = self.max_running_requests - len(self.running)
        held = self._held_tokens() if self.waiting else 0
        while budget > 0 and len(chunks) < places:
            sequence = self._partial
            if sequence is None:
                if not self.waiting:
                    break
                sequence = self.waiting[0]
                need = sequence.prompt_tokens + sequence.max_tokens
                if held + need > params.kv_tokens:
                    break
                held += need
                self.waiting.popleft()
                sequence.state = State.PREFILL
                sequence.prefilled_tokens = 0 if sequence.retractions else sequence.cached_tokens
                self.kv_used_tokens += sequence.prefilled_tokens
            left = sequence.context_tokens - sequence.prefilled_tokens
            take = min(left, budget)
            budget -= take
            chunks.append((sequence, take))
            self._partial = sequence if take < left else None
        return chunks

    def _held_tokens(self) -> float:
        """KV slots in use, and those that admission leaves to the sequences already in."""
        partial = self._partial
        outstanding = sum(sequence.max_tokens - sequence.output_tokens for sequence in self.running)
        held = self.kv_used_tokens + NEW_TOKEN_RATIO * outstanding
        if partial is not None:
            held += partial.prompt_tokens + partial.max_tokens - partial.prefilled_tokens
        return held

    def _retract_until_the_step_fits(self) -> None:
        step_slots = self._mode().step_slots
        room = self.params.kv_tokens
        if self.kv_used_tokens + len(self.running) * step_slots <= room:
            return
        # Those that are being aborted leave with this step anyway.
        victims = sorted(
            (sequence for sequence in self.running if not sequence.aborting),
            key=lambda sequence: (-sequence.output_tokens, sequence.prompt_tokens),
        )
        while len(victims) > 1 and self.kv_used_tokens + len(self.running) * step_slots > room:
            victim = victims.pop()
            self.running.remove(victim)
            self.kv_used_tokens -= victim.context_tokens
            self.totals.retractions += 1
            victim.retractions += 1
            victim.state = State.WAITING
            self.waiting.append(victim)

    def _end_prefill(
        self,
        chunks: Iterable[tuple[Sequence, int]],
        rng: Rng,
        emitted: list[tuple[Sequence, int]],
        ended: list[Sequence],
    ) -> None:
        acceptance = self._mode().acceptance
        self.totals.prefill_passes += 1
        for sequence, tokens in chunks:
            sequence.prefilled_tokens += tokens
            self.kv_used_tokens += tokens
            self.totals.prompt_tokens += tokens
            if sequence.aborting:
                if self._partial is sequence:
                    self._partial = None
                self._leave(sequence, State.ABORTED, sequence.prefilled_tokens, ended)
                continue
            if sequence is self._partial:
                continue
            if acceptance is not None and not sequence.chances:
                sequence.chances = acceptance.draw(rng)
            if sequence.output_tokens < sequence.max_tokens:
                sequence.output_tokens += 1
                self.kv_used_tokens += 1
                self.totals.output_tokens += 1
                emitted.append((sequence, 1))
            if sequence.output_tokens >= sequence.max_tokens:
                self._leave(sequence, State.FINISHED, sequence.context_tokens, ended)
            else:
                sequence.state = State.RUNNING
                self.running.append(sequence)

    def _end_decode(
        self, rng: Rng, emitted: list[tuple[Sequence, int]], ended: list[Sequence]
    ) -> None:
        acceptance = self._mode().acceptance
        draw = rng.random
        decoded = 0
        for sequence in self.running:
            if sequence.aborting:
                self._leave(sequence, State.ABORTED, sequence.context_tokens, ended)
                continue
            tokens = 1
            if acceptance is not None:
                luck = draw()
                for chance in sequence.chances:
                    if luck >= chance:
                        break
                    tokens += 1
            left = sequence.max_tokens - sequence.output_tokens
            tokens = min(tokens, left)
            sequence.output_tokens += tokens
            sequence.decode_steps += 1
            decoded += tokens
            emitted.append((sequence, tokens))
            if tokens == left:
                self._leave(sequence, State.FINISHED, sequence.context_tokens, ended)
        self.kv_used_tokens += decoded
        totals = self.totals
        totals.decode_steps += 1
        totals.sequence_steps += len(emitted)
        totals.decoded_tokens += decoded
        totals.output_tokens += decoded
        if ended:
            self.running = [
                sequence for sequence in self.running if sequence.state is State.RUNNING
            ]

    def _leave(
        self, sequence: Sequence, state: State, held_tokens: int, ended: list[Sequence]
    ) -> None:
        sequence.state = state
        self.kv_used_tokens -= held_tokens
        ended.append(sequence)
