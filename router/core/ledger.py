"""Who has what in flight, by the router's own count.

One lease per attempt. It enters its server's prefill count when it is acquired, moves to the decode
count at its first token, and leaves whichever it is in when it is released. A count changes nowhere
else: nothing expires, is clamped, or is corrected from outside, so a count that is not zero when
all is quiet is a bug, with a lease to show for it (`oldest_age_s`). Late and repeated calls change
nothing. Each operation costs the same at any load.

What the learner needs of the past is kept as integrals over time, brought up to date whenever a
count changes, and as the latest times to first token.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.core.types import Outcome, Phase, RequestShape, Role, ServerLoad, ServerSpec

TTFT_SAMPLES_MAX = 64


@dataclass(frozen=True, slots=True)
class Totals:
    """A server's integrals over time since the start; what lies between two moments is a window.

    `sequence_s` and `context_token_s` integrate sequences in flight and their prompt tokens,
    `decode_sequence_s` the sequences that decode. `busy_s` is time with any sequence in flight,
    `decode_busy_s` with any that decodes, `overlap_s` with work here and on another server too.
    `started_sequences` and `prefilled_tokens` count what has reached its first token,
    `ended_sequences` what has left.
    """

    sequence_s: float = 0.0
    decode_sequence_s: float = 0.0
    context_token_s: float = 0.0
    busy_s: float = 0.0
    decode_busy_s: float = 0.0
    overlap_s: float = 0.0
    started_sequences: int = 0
    prefilled_tokens: int = 0
    ended_sequences: int = 0


@dataclass(frozen=True, slots=True)
class TtftSample:
    """One request's time to first token, the prompt tokens that it asked for, and those that were
    to be prefilled when it came, its own included.
    """

    ttft_s: float
    prompt_tokens: int
    prefill_tokens: int


@dataclass(slots=True)
class _Busy:
    """How many servers have work, and for how long two or more have had it at once."""

    servers: int = 0
    overlap_s: float = 0.0
    at: float = 0.0

    def change(self, by: int, now: float) -> None:
        self.overlap_s = self.overlap_until(now)
        self.at = now
        self.servers += by

    def overlap_until(self, now: float) -> float:
        return self.overlap_s + (now - self.at if self.servers > 1 else 0.0)


@dataclass(slots=True)
class _Count:
    """The sums over one server's open leases, and their integrals up to `at`."""

    name: str
    role: Role
    busy: _Busy
    prefill_sequences: int = 0
    decode_sequences: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    at: float = 0.0
    overlap_mark_s: float = 0.0
    sequence_s: float = 0.0
    decode_sequence_s: float = 0.0
    context_token_s: float = 0.0
    busy_s: float = 0.0
    decode_busy_s: float = 0.0
    overlap_s: float = 0.0
    started_sequences: int = 0
    prefilled_tokens: int = 0
    ended_sequences: int = 0
    _load: ServerLoad | None = None
    ttft: deque[TtftSample] = field(default_factory=lambda: deque(maxlen=TTFT_SAMPLES_MAX))

    def load(self) -> ServerLoad:
        """Return the load, the same object until a count changes."""
        if self._load is None:
            self._load = ServerLoad(
                self.name,
                self.role,
                self.prefill_sequences,
                self.decode_sequences,
                self.prefill_tokens,
                self.context_tokens,
            )
        return self._load

    def advance(self, now: float) -> None:
        """Bring the integrals up to `now`, before a count changes."""
        elapsed_s = now - self.at
        self.at = now
        sequences = self.prefill_sequences + self.decode_sequences
        if sequences:
            self.busy_s += elapsed_s
            self.sequence_s += elapsed_s * sequences
            self.context_token_s += elapsed_s * self.context_tokens
            if self.decode_sequences:
                self.decode_busy_s += elapsed_s
                self.decode_sequence_s += elapsed_s * self.decode_sequences
            overlap_s = self.busy.overlap_until(now)
            self.overlap_s += overlap_s - self.overlap_mark_s
            self.overlap_mark_s = overlap_s

    def enter(self, shape: RequestShape, now: float) -> None:
        self.advance(now)
        if shape.sequences and not self.prefill_sequences + self.decode_sequences:
            self.busy.change(+1, now)
            self.overlap_mark_s = self.busy.overlap_s
        self._load = None
        self.prefill_sequences += shape.sequences
        self.prefill_tokens += shape.prompt_tokens
        self.context_tokens += shape.prompt_tokens

    def start_decoding(self, shape: RequestShape, now: float) -> None:
        self.advance(now)
        self._load = None
        self.prefill_sequences -= shape.sequences
        self.prefill_tokens -= shape.prompt_tokens
        self.decode_sequences += shape.sequences
        self.started_sequences += shape.sequences
        self.prefilled_tokens += shape.prompt_tokens

    def leave(self, shape: RequestShape, phase: Phase, now: float) -> None:
        self.advance(now)
        self._load = None
        if phase is Phase.PREFILL:
            self.prefill_sequences -= shape.sequences
            self.prefill_tokens -= shape.prompt_tokens
        else:
            self.decode_sequences -= shape.sequences
        self.context_tokens -= shape.prompt_tokens
        self.ended_sequences += shape.sequences
        if shape.sequences and not self.prefill_sequences + self.decode_sequences:
            self.busy.change(-1, now)


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt's place on one server, made by `Ledger.acquire`.

    Whoever holds it releases it, whatever happens. Times are monotonic seconds.
    """

    server: str
    shape: RequestShape
    acquired_at: float
    prefill_tokens_ahead: int
    _count: _Count = field(repr=False)
    _ledger: "Ledger" = field(repr=False)
    first_token_at: float | None = None
    outcome: Outcome | None = None
    released_at: float | None = None

    @property
    def phase(self) -> Phase:
        """Which of its server's counts it is in, or was in at its release."""
        return Phase.PREFILL if self.first_token_at is None else Phase.DECODE

    def first_token(self, now: float) -> None:
        """Move from prefill to decode. Nothing happens the second time, or after the release."""
        if self.first_token_at is not None or self.outcome is not None:
            return
        self.first_token_at = now
        self._count.start_decoding(self.shape, now)
        if self._ledger.on_room is not None:
            self._ledger.on_room()

    def release(self, outcome: Outcome, now: float) -> bool:
        """Give the place back. True the first time; after that nothing changes."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.released_at = now
        self._count.leave(self.shape, self.phase, now)
        # An answer that came in one piece tells when it was complete, not when it began.
        if self.first_token_at is not None and now > self.first_token_at:
            prompt_tokens = self.shape.prompt_tokens
            self._count.ttft.append(
                TtftSample(
                    self.first_token_at - self.acquired_at,
                    prompt_tokens,
                    self.prefill_tokens_ahead + prompt_tokens,
                )
            )
        self._ledger.closed(self)
        return True


class Ledger:
    """The loads of all servers, kept by leases.

    `on_room` is called whenever a count has become less: when a lease leaves prefill, and when it
    is released. Its caller is in the middle of something: it must put off what it does.
    """

    def __init__(self, servers: Sequence[ServerSpec]) -> None:
        busy = _Busy()
        self._counts = {server.name: _Count(server.name, server.role, busy) for server in servers}
        if len(self._counts) != len(servers):
            raise ValueError("server names must be unique")
        # An OrderedDict finds its oldest entry at once; a dict walks over deleted ones first.
        self._open: OrderedDict[Lease, None] = OrderedDict()
        self.on_room: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Open leases."""
        return len(self._open)

    def acquire(self, server: str, shape: RequestShape, now: float) -> Lease:
        """Open a lease, in its prefill phase.

        ValueError, and nothing changed, on an unknown server or a negative size.
        """
        if shape.sequences < 0 or shape.prompt_tokens < 0:
            raise ValueError(f"sizes must not be negative: {shape}")
        if server not in self._counts:
            raise ValueError(f"unknown server {server!r}, known: {', '.join(self._counts)}")
        count = self._counts[server]
        lease = Lease(server, shape, now, count.prefill_tokens, count, self)
        count.enter(shape, now)
        self._open[lease] = None
        return lease

    def closed(self, lease: Lease) -> None:
        """Forget a lease: it has been released, and calls this itself."""
        del self._open[lease]
        if self.on_room is not None:
            self.on_room()

    def load(self, name: str) -> ServerLoad:
        """Return one server's load. KeyError if there is no such server."""
        return self._counts[name].load()

    def loads(self) -> tuple[ServerLoad, ...]:
        """Return every server's load, in the order of the configuration."""
        return tuple(count.load() for count in self._counts.values())

    def totals(self, name: str, now: float) -> Totals:
        """Return one server's integrals up to `now`. KeyError if there is no such server."""
        count = self._counts[name]
        count.advance(now)
        return Totals(
            count.sequence_s,
            count.decode_sequence_s,
            count.context_token_s,
            count.busy_s,
            count.decode_busy_s,
            count.overlap_s,
            count.started_sequences,
            count.prefilled_tokens,
            count.ended_sequences,
        )

    def take_ttft_samples(self, name: str) -> tuple[TtftSample, ...]:
        """Return the times to first token since the last call, the latest if they were many."""
        samples = self._counts[name].ttft
        taken = tuple(samples)
        samples.clear()
        return taken

    def oldest_age_s(self, now: float) -> float | None:
        """Age of the oldest open lease in seconds, None if there is none."""
        for lease in self._open:
            return now - lease.acquired_at
        return None
