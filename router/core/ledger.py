"""Who has what in flight, by the router's own count.

One lease per attempt. It enters its server's prefill count when it is acquired, moves to the decode
count at its first token, and leaves whichever it is in when it is released. A count changes nowhere
else: nothing expires, is clamped, or is corrected from outside, so a count that is not zero when
all is quiet is a bug, with a lease to show for it (`oldest_age_s`). Late and repeated calls change
nothing. Each operation costs the same at any load.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.types import Outcome, Phase, RequestShape, Role, ServerLoad, ServerSpec


@dataclass(slots=True)
class _Count:
    """The sums over one server's open leases."""

    name: str
    role: Role
    prefill_sequences: int = 0
    decode_sequences: int = 0
    prefill_tokens: int = 0

    def load(self) -> ServerLoad:
        return ServerLoad(
            self.name, self.role, self.prefill_sequences, self.decode_sequences, self.prefill_tokens
        )


@dataclass(slots=True, eq=False)
class Lease:
    """One attempt's place on one server, made by `Ledger.acquire`.

    Whoever holds it releases it, whatever happens. Times are monotonic seconds.
    """

    server: str
    shape: RequestShape
    acquired_at: float
    _count: _Count = field(repr=False)
    _open: "OrderedDict[Lease, None]" = field(repr=False)
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
        self._count.prefill_sequences -= self.shape.sequences
        self._count.prefill_tokens -= self.shape.prompt_tokens
        self._count.decode_sequences += self.shape.sequences

    def release(self, outcome: Outcome, now: float) -> bool:
        """Give the place back. True the first time; after that nothing changes."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.released_at = now
        if self.phase is Phase.PREFILL:
            self._count.prefill_sequences -= self.shape.sequences
            self._count.prefill_tokens -= self.shape.prompt_tokens
        else:
            self._count.decode_sequences -= self.shape.sequences
        del self._open[self]
        return True


class Ledger:
    """The loads of all servers, kept by leases."""

    def __init__(self, servers: Sequence[ServerSpec]) -> None:
        self._counts = {server.name: _Count(server.name, server.role) for server in servers}
        if len(self._counts) != len(servers):
            raise ValueError("server names must be unique")
        # An OrderedDict finds its oldest entry at once; a dict walks over deleted ones first.
        self._open: OrderedDict[Lease, None] = OrderedDict()

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
        count.prefill_sequences += shape.sequences
        count.prefill_tokens += shape.prompt_tokens
        lease = Lease(server, shape, now, count, self._open)
        self._open[lease] = None
        return lease

    def load(self, name: str) -> ServerLoad:
        """Return one server's load. KeyError if there is no such server."""
        return self._counts[name].load()

    def loads(self) -> tuple[ServerLoad, ...]:
        """Return every server's load, in the order of the configuration."""
        return tuple(count.load() for count in self._counts.values())

    def oldest_age_s(self, now: float) -> float | None:
        """Age of the oldest open lease in seconds, None if there is none."""
        for lease in self._open:
            return now - lease.acquired_at
        return None
