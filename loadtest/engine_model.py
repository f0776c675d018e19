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

A step costs the same at any batch (engine_batch.py) for whoever does not ask what each request got
(`end(each=False)`); and steps in which nothing ends may be taken as one (`begin(horizon_s)`).
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from loadtest.engine_batch import Batch, Sequence, State
from loadtest.engine_params import REFERENCE_CONTEXT_TOKENS, DecodeMode, EngineParams, Rng

# The share of the running requests' outstanding tokens that admission keeps free: between the 0.7
# that SGLang's estimate starts from and the 0.1 that it decays to.
NEW_TOKEN_RATIO = 0.4
_ROUNDING_S = 1e-9


class Work(Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has ended. `ended` are the sequences that finished or were aborted in it;
    `emitted` is who got how many tokens, without those of decode steps if `each` was not asked for.
    """

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

    def leave(self, engine: "Engine") -> None:
        """Take an engine off."""
        self._tenants.remove(engine)

    def slowdown(self) -> float:
        """Return how much longer a step takes now than on idle GPUs."""
        busy = sum(engine.has_work for engine in self._tenants)
        return busy / (2 * self.CONTENDED_SHARE_OF_TWO) if busy > 1 else 1.0


@dataclass(slots=True)
class Totals:
    """What an engine has done since it started."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    sequence_steps: int = 0
    decoded_tokens: int = 0
    retractions: int = 0


@dataclass(slots=True)
class _Pass:
    """The step under way: the prefill chunks (sequence, tokens), or `steps` decode steps."""

    duration_s: float
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    # Seconds from the start to the end of each decode step.
    ends_s: list[float] = field(default_factory=list)


class Engine:
    """The scheduler: a waiting queue, the running batch, the KV slots, and the step under way.

    `slowness` scales all times; a caller may change it between steps.
    """

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
        self.slowness = 1.0
        self.totals = Totals()
        self.kv_used_tokens = 0
        self.running = Batch(params.decode.acceptance)
        self.waiting: deque[Sequence] = deque()
        self._partial: Sequence | None = None
        self._pass: _Pass | None = None
        self._aborting: list[Sequence] = []
        self._mode = params.decode

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
        elif sequence.state in (State.PREFILL, State.RUNNING) and not sequence.aborting:
            sequence.aborting = True
            self._aborting.append(sequence)

    def change(self, params: EngineParams) -> None:
        """Go on as another model, as of the next step: the same requests, other luck."""
        self.params = params
        self._mode = params.decode
        self.running.drafts = params.decode.acceptance
        self.running.change_mode(params.decode.acceptance, new_luck=True)

    def begin(self, horizon_s: float = 0.0) -> float | None:
        """Start the next step; return its duration in seconds, None if there is nothing to do.

        Decode steps in which nothing ends are taken together as long as they end by `horizon_s`
        from now. Whoever submits, aborts or looks before the end must `cut` first.
        """
        if self._pass is not None:
            raise RuntimeError("a step is under way")
        chunks = self._admit() if self.waiting or self._partial else []
        slowdown = self.gpu.slowdown() * self.slowness
        if chunks:
            tokens = sum(tokens for _, tokens in chunks)
            duration_s = self.params.prefill_pass_s + self.params.prefill_token_s * tokens
            self._pass = _Pass(duration_s * slowdown, chunks)
        elif self.running:
            mode = self._decide()
            if mode is not self._mode:
                self._mode = mode
                self.running.change_mode(mode.acceptance)
            self._retract_until_the_step_fits()
            ends_s = self._decode_ends_s(slowdown, horizon_s)
            self._pass = _Pass(ends_s[-1], ends_s=ends_s)
        else:
            return None
        return self._pass.duration_s

    def cut(self, elapsed_s: float) -> float | None:
        """Let what is under way end with the step that `elapsed_s` falls into; return its duration
        as it is now, None if nothing is under way.
        """
        current = self._pass
        if current is None:
            return None
        if len(current.ends_s) > 1:
            del current.ends_s[bisect_left(current.ends_s, elapsed_s) + 1 :]
            current.duration_s = current.ends_s[-1]
        return current.duration_s

    def end(self, rng: Rng, *, each: bool = True) -> Step:
        """Apply the step that `begin` started."""
        if self._pass is None:
            raise RuntimeError("no step is under way")
        current, self._pass = self._pass, None
        emitted: list[tuple[Sequence, int]] = []
        ended: list[Sequence] = []
        if current.chunks:
            self._end_prefill(current.chunks, rng, emitted, ended)
            return Step(Work.PREFILL, current.duration_s, emitted, ended)
        self.running.plan_anew(rng)
        if self._aborting:
            self._end_aborted(ended)
        if each:
            emitted += self.running.next_yields()
        self._end_decode(len(current.ends_s), ended)
        return Step(Work.DECODE, current.duration_s, emitted, ended)

    def _decide(self) -> DecodeMode:
        """Return how the next step decodes. An engine that changes its mode decides here."""
        return self._mode

    def _decode_ends_s(self, slowdown: float, horizon_s: float) -> list[float]:
        """Return when the next decode steps end: of one, or of those up to the horizon."""
        batch = len(self.running)
        token_s = self.params.kv_token_s * slowdown
        reference_s = self._mode.step_s(batch) * slowdown
        # A context shorter than the reference saves reading KV, but a step does more than that.
        least_s = reference_s / 2
        context = self._running_context_tokens()
        fixed_s = reference_s - token_s * batch * REFERENCE_CONTEXT_TOKENS
        end_s = max(fixed_s + token_s * context, least_s)
        ends_s = [end_s]
        if end_s >= horizon_s or self._aborting:
            return ends_s
        room = self.params.kv_tokens - self.kv_used_tokens - batch * self._mode.step_slots
        for tokens in self.running.quiet_yields():
            room -= tokens
            if room < 0:
                break
            context += tokens
            end_s += max(fixed_s + token_s * context, least_s)
            # A step that is under way at the horizon is one of its own: whoever looks then sees
            # the tokens of all before it.
            if end_s > horizon_s + _ROUNDING_S:
                break
            ends_s.append(end_s)
        return ends_s

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

    def _running_context_tokens(self) -> int:
        partial = self._partial
        return self.kv_used_tokens - (partial.prefilled_tokens if partial else 0)

    def _held_tokens(self) -> float:
        """KV slots in use, and those that admission leaves to the sequences already in."""
        partial = self._partial
        outstanding = self.running.longest_tokens - self._running_context_tokens()
        held = self.kv_used_tokens + NEW_TOKEN_RATIO * outstanding
        if partial is not None:
            held += partial.prompt_tokens + partial.max_tokens - partial.prefilled_tokens
        return held

    def _retract_until_the_step_fits(self) -> None:
        step_slots = self._mode.step_slots
        room = self.params.kv_tokens
        if self.kv_used_tokens + len(self.running) * step_slots <= room:
            return
        # Those that are being aborted leave with this step anyway.
        got = self.running.output_tokens
        victims = sorted(
            (sequence for sequence in self.running if not sequence.aborting),
            key=lambda sequence: (-got(sequence), sequence.prompt_tokens),
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
        for sequence, tokens in chunks:
            sequence.prefilled_tokens += tokens
            self.kv_used_tokens += tokens
            self.totals.prompt_tokens += tokens
            if sequence.aborting:
                if self._partial is sequence:
                    self._partial = None
                self._aborting.remove(sequence)
                self._leave(sequence, State.ABORTED, sequence.prefilled_tokens, ended)
                continue
            if sequence is self._partial:
                continue
            if sequence.output_tokens < sequence.max_tokens:
                sequence.output_tokens += 1
                self.kv_used_tokens += 1
                self.totals.output_tokens += 1
                emitted.append((sequence, 1))
            if sequence.output_tokens >= sequence.max_tokens:
                self._leave(sequence, State.FINISHED, sequence.context_tokens, ended)
            else:
                self.running.add(sequence, rng)

    def _end_aborted(self, ended: list[Sequence]) -> None:
        for sequence in [s for s in self._aborting if s.state is State.RUNNING]:
            self._aborting.remove(sequence)
            self.running.remove(sequence)
            self._leave(sequence, State.ABORTED, sequence.context_tokens, ended)

    def _end_decode(self, steps: int, ended: list[Sequence]) -> None:
        totals = self.totals
        batch = len(self.running)
        decoded, last = self.running.step(steps)
        self.kv_used_tokens += decoded
        totals.decode_steps += steps
        totals.sequence_steps += batch * steps
        totals.decoded_tokens += decoded
        totals.output_tokens += decoded
        for sequence in last:
            self._leave(sequence, State.FINISHED, sequence.context_tokens, ended)

    def _leave(
        self, sequence: Sequence, state: State, held_tokens: int, ended: list[Sequence]
    ) -> None:
        sequence.state = state
        self.kv_used_tokens -= held_tokens
        ended.append(sequence)
