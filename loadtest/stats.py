"""Figures from rows. Pure.

Tokens come from the usage. A request without one (cut off by the end of the run, or failed in mid-
stream) is counted by its events times the tokens an event carried on the same server;
`tokens_estimated` says how many are such.

The inter-token latency shares each gap between two events among the tokens that an event carried on
average in that request, so that an engine which sends several tokens at once compares with one that
sends one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor

from loadtest.record import Ending, RequestRow


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` (0 to 1) of them lies, interpolated; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(values_s: Iterable[float]) -> dict[str, float | None]:
    """Return median and 99th percentile of seconds, in milliseconds."""
    values = list(values_s)
    return {"p50": _ms(percentile(values, 0.50)), "p99": _ms(percentile(values, 0.99))}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def token_counts(rows: Sequence[RequestRow]) -> list[float]:
    """Return each row's tokens: of its usage, else estimated from its events."""
    per_event = _tokens_per_event(rows)
    overall = per_event.get(None, 1.0)
    return [
        float(row.tokens)
        if row.tokens is not None
        else row.events * per_event.get(row.server, overall)
        for row in rows
    ]


def _tokens_per_event(rows: Iterable[RequestRow]) -> Mapping[str | None, float]:
    tokens: Counter[str | None] = Counter()
    events: Counter[str | None] = Counter()
    for row in rows:
        if row.tokens is not None and row.events:
            for key in {row.server, None}:
                tokens[key] += row.tokens
                events[key] += row.events
    return {key: tokens[key] / events[key] for key in tokens}


def switches(rows: Iterable[RequestRow]) -> int:
    """Return how often a request went to another server than the one sent before it."""
    sent = sorted((row for row in rows if row.server is not None), key=lambda row: row.sent_s)
    return sum(before.server != after.server for before, after in pairwise(sent))


def summarise(
    rows: Sequence[RequestRow], duration_s: float, clock: float = 1.0
) -> dict[str, object]:
    """Return one run's figures, in engine time: measured time times the engines' clock."""
    counts = token_counts(rows)
    tokens = sum(counts)
    exact = sum(row.tokens for row in rows if row.tokens is not None)
    finished = [row for row in rows if row.ending is Ending.OK and row.end_s is not None]
    kinds = Counter(row.ending for row in rows if row.ending is not None and row.ending.is_error)
    by_server = Counter(row.server for row in rows if row.server is not None)
    return {
        "tokens": round(tokens),
        "tok_s": round(tokens / (duration_s * clock), 1) if duration_s > 0 else None,
        "requests": len(rows),
        "errors": kinds.total(),
        "ttft_ms": spread_ms(
            (row.first_s - row.intended_s) * clock for row in rows if row.first_s is not None
        ),
        "itl_ms": spread_ms(gap * clock for gap in _token_gaps(rows, counts)),
        "e2e_ms": spread_ms((row.end_s - row.intended_s) * clock for row in finished if row.end_s),
        "switches": switches(rows),
        "finished": len(finished),
        "cut": sum(row.ending is Ending.CUT for row in rows),
        "tokens_estimated": round(tokens - exact),
        "duration_s": round(duration_s * clock, 3),
        "error_kinds": dict(kinds),
        "error_examples": sorted({row.error for row in rows if row.error})[:5],
        "requests_by_server": dict(by_server),
    }


def _token_gaps(rows: Sequence[RequestRow], counts: Sequence[float]) -> Iterable[float]:
    for row, tokens in zip(rows, counts, strict=True):
        if row.gaps_s:
            share = min(row.events / tokens, 1.0)
            yield from (gap * share for gap in row.gaps_s)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in equal steps: middles in seconds, tokens per second, mean requests in flight."""

    at_s: tuple[float, ...]
    tok_s: tuple[float, ...]
    in_flight: Mapping[str, tuple[float, ...]]


def timeline(
    rows: Sequence[RequestRow], duration_s: float, step_s: float, clock: float = 1.0
) -> Timeline:
    """Spread each row's tokens over the steps in which its events arrived, in engine time."""
    bins = max(round(duration_s / step_s), 1)
    tokens = [0.0] * bins
    busy: dict[str, list[float]] = {}
    for row, count in zip(rows, token_counts(rows), strict=True):
        if row.events and row.first_s is not None:
            at = row.first_s
            _add(tokens, at / step_s, count / row.events)
            for gap in row.gaps_s:
                at += gap
                _add(tokens, at / step_s, count / row.events)
        end = min(row.end_s if row.end_s is not None else duration_s, duration_s)
        if row.server is not None:
            _occupy(busy.setdefault(row.server, [0.0] * bins), row.sent_s / step_s, end / step_s)
    return Timeline(
        at_s=tuple(round((i + 0.5) * step_s * clock, 4) for i in range(bins)),
        tok_s=tuple(round(n / (step_s * clock), 1) for n in tokens),
        in_flight={name: tuple(round(x, 3) for x in busy[name]) for name in sorted(busy)},
    )


def _add(bins: list[float], place: float, amount: float) -> None:
    if 0 <= place < len(bins):
        bins[int(place)] += amount


def _occupy(bins: list[float], start: float, end: float) -> None:
    for i in range(max(int(start), 0), min(int(end) + 1, len(bins))):
        bins[i] += max(min(end, i + 1) - max(start, i), 0.0)
