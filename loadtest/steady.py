"""Figures of a stretch of a run: what a load does once it is steady. Pure.

The stretch cuts through requests. Tokens between two events count by the share of that time which
lies within, so that a slow engine, which sends a batch's tokens all at once, is not counted by how
many such bursts happen to fall inside. A request's latencies count where they end: its TTFT if the
first token comes within the stretch, its end-to-end time if it ends within.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.record import Ending, RequestRow
from loadtest.stats import spread_ms, switches, token_counts


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened in a time: `decode_s` are seconds times the sequences that decoded."""

    seconds: float
    tokens: float
    decode_tokens: float
    decode_s: float

    @property
    def tok_s(self) -> float:
        """Tokens per second of all requests."""
        return self.tokens / self.seconds

    @property
    def sequences(self) -> float:
        """Mean sequences past their first token."""
        return self.decode_s / self.seconds

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token of one sequence after its first; None if there was none."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else None

    def on_clock(self, clock: float) -> "Stretch":
        """Return it in engine time, of which `clock` seconds go by in one."""
        return replace(self, seconds=self.seconds * clock, decode_s=self.decode_s * clock)


def stretch(
    rows: Sequence[RequestRow],
    start_s: float,
    end_s: float,
    counts: Sequence[float] | None = None,
) -> Stretch:
    """Return what happened from `start_s` to `end_s`, in seconds of the run."""
    counts = token_counts(rows) if counts is None else counts
    return total(
        [part(row, n, start_s, end_s) for row, n in zip(rows, counts, strict=True)], end_s - start_s
    )


def part(row: RequestRow, tokens: float, start_s: float, end_s: float) -> Stretch:
    """Return what one request, which got so many tokens in all, did from `start_s` to `end_s`."""
    decoded = decode_s = 0.0
    if row.first_s is None or not row.events:
        return Stretch(end_s - start_s, 0.0, 0.0, 0.0)
    # The first event of a speculating engine carries one token: it is the prefill's.
    per_gap = (tokens - 1) / (row.events - 1) if row.events > 1 else 0.0
    for gap_start_s, gap_s in _gaps(row):
        inside_s = min(gap_start_s + gap_s, end_s) - max(gap_start_s, start_s)
        if gap_s == 0.0:
            decoded += per_gap * (start_s <= gap_start_s < end_s)
        elif inside_s > 0:
            decoded += per_gap * inside_s / gap_s
            decode_s += inside_s
    first = float(start_s <= row.first_s < end_s)
    return Stretch(end_s - start_s, first + decoded, decoded, decode_s)


def total(parts: Iterable[Stretch], seconds: float) -> Stretch:
    """Return the sum of parts that make up so many seconds."""
    tokens = decode_tokens = decode_s = 0.0
    for one in parts:
        tokens += one.tokens
        decode_tokens += one.decode_tokens
        decode_s += one.decode_s
    return Stretch(seconds, tokens, decode_tokens, decode_s)


def _gaps(row: RequestRow) -> Iterator[tuple[float, float]]:
    assert row.first_s is not None
    at = row.first_s
    for gap_s in row.gaps_s:
        yield at, gap_s
        at += gap_s


def figures(
    rows: Sequence[RequestRow], start_s: float, end_s: float, clock: float = 1.0
) -> dict[str, object]:
    """Return the figures of the stretch under the names of a run's, in engine time.

    `request_tok_s` is the speed of one request after its first token. Errors are all of the run's:
    what fails while warming up has failed too.
    """
    counts = token_counts(rows)
    seen = stretch(rows, start_s, end_s, counts)
    kinds = Counter(row.ending for row in rows if row.ending is not None and row.ending.is_error)
    inside = [row for row in rows if row.end_s is None or row.end_s >= start_s]
    finished = [
        row
        for row in inside
        if row.ending is Ending.OK and row.end_s is not None and row.end_s < end_s
    ]
    tpot_s = seen.tpot_s
    return {
        "tokens": round(seen.tokens),
        "tok_s": round(seen.tok_s / clock, 2),
        "request_tok_s": None if tpot_s is None else round(1 / tpot_s / clock, 2),
        "requests": len(inside),
        "errors": kinds.total(),
        "ttft_ms": spread_ms(
            (row.first_s - row.intended_s) * clock
            for row in inside
            if row.first_s is not None and start_s <= row.first_s < end_s
        ),
        "itl_ms": spread_ms(gap_s * clock for gap_s in _token_gaps(rows, counts, start_s, end_s)),
        "e2e_ms": spread_ms(
            (row.end_s - row.intended_s) * clock for row in finished if row.end_s is not None
        ),
        "switches": switches(inside),
        "finished": len(finished),
        "duration_s": round((end_s - start_s) * clock, 3),
        "error_kinds": dict(kinds),
        "error_examples": sorted({row.error for row in rows if row.error})[:5],
        "requests_by_server": dict(Counter(row.server for row in inside if row.server is not None)),
    }


def _token_gaps(
    rows: Sequence[RequestRow], counts: Sequence[float], start_s: float, end_s: float
) -> Iterator[float]:
    """Return the gaps that end within, shared among the tokens of an event as in stats."""
    for row, tokens in zip(rows, counts, strict=True):
        if row.first_s is not None and row.events and tokens:
            share = min(row.events / tokens, 1.0)
            for gap_start_s, gap_s in _gaps(row):
                if start_s <= gap_start_s + gap_s < end_s:
                    yield gap_s * share
