"""From cumulative counts to windows: what a server did between two looks at it."""

from dataclasses import dataclass

from router.core.ledger import Totals

# A window ends with the first look that finds these many tokens in it, after a second of work with
# fewer; it is given up where even those do not come.
_LENGTH_S_MIN = 0.2
_TOKENS_SOON = 64.0
_BUSY_S_LONG = 1.0
_TOKENS_MIN = 24.0
_LENGTH_S_MAX = 60.0
_GROWTH_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Window:
    """What one server did within `length_s` seconds up to `at`.

    `sequences` is the mean in flight while any was, `context_tokens` their mean prompt tokens
    together, `overlap` the share of the busy time with work on another server too.
    """

    at: float
    length_s: float
    busy_s: float
    sequence_s: float
    decode_sequence_s: float
    tokens: float
    context_tokens: float
    overlap: float
    started_sequences: int
    prefilled_tokens: int
    grown_sequences: int

    @property
    def sequences(self) -> float:
        """Mean sequences in flight over the busy time."""
        return self.sequence_s / self.busy_s

    @property
    def seconds_per_token(self) -> float:
        """Time that one sequence in flight took for each of its tokens."""
        return self.sequence_s / self.tokens

    @property
    def usable(self) -> bool:
        """Whether it says something of the server's speed: work, tokens, and no burst within it.

        A burst of arrivals has sequences in flight that could not have had a token yet.
        """
        return (
            self.tokens >= _TOKENS_MIN
            and self.busy_s > 0
            and abs(self.grown_sequences) <= max(1.0, _GROWTH_MAX * self.sequences)
        )


class WindowCutter:
    """Cuts one server's cumulative counts into windows."""

    def __init__(self) -> None:
        self._start: tuple[float, Totals, float, int] | None = None

    def cut(self, now: float, totals: Totals, tokens: float, sequences: int) -> Window | None:
        """Take the counts of now; return the window that ends here, None while it is too short.

        `tokens` are cumulative output tokens, `sequences` those in flight.
        """
        if self._start is None or tokens < self._start[2]:
            self._start = (now, totals, tokens, sequences)
            return None
        at, before, tokens_before, sequences_before = self._start
        length_s, new_tokens = now - at, tokens - tokens_before
        busy_s = totals.busy_s - before.busy_s
        enough = new_tokens >= _TOKENS_SOON or (new_tokens >= _TOKENS_MIN and busy_s > _BUSY_S_LONG)
        if length_s < _LENGTH_S_MIN or not (enough or length_s > _LENGTH_S_MAX):
            return None
        self._start = (now, totals, tokens, sequences)
        return Window(
            at=now,
            length_s=length_s,
            busy_s=busy_s,
            sequence_s=totals.sequence_s - before.sequence_s,
            decode_sequence_s=totals.decode_sequence_s - before.decode_sequence_s,
            tokens=new_tokens,
            context_tokens=(totals.context_token_s - before.context_token_s) / max(busy_s, 1e-9),
            overlap=min(1.0, (totals.overlap_s - before.overlap_s) / max(busy_s, 1e-9)),
            started_sequences=totals.started_sequences - before.started_sequences,
            prefilled_tokens=totals.prefilled_tokens - before.prefilled_tokens,
            grown_sequences=sequences - sequences_before,
        )
