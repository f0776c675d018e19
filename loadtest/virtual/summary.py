"""A run's figures, and one run against another."""

from collections.abc import Sequence
from math import floor

from loadtest.stats import percentile, spread_ms
from loadtest.virtual.curves import KNOWN_MAX, Curve, best_single_tok_s, best_split
from loadtest.virtual.loop import OBSERVE_S
from loadtest.virtual.record import Request, Run

SETTLE_WINDOW_S = 5.0
SETTLED_SHARE = 0.97


def figures(run: Run, curves: Sequence[Curve]) -> dict[str, object]:
    """Return a run as it stands in the results; unfinished requests count at their age.

    `switches` are changes of the mode, if the policy has one. `regret_o1` and `regret_o3` are
    tokens that an oracle would have made at the run's own requests in flight, over those made, less
    1 (better single server, best split); they hold for two servers of known curves.
    """
    requests = run.requests
    done = [r for r in requests if r.end_s is not None and not r.failed]
    found: dict[str, object] = {
        "tokens": run.tokens,
        "tok_s": round(run.tokens / run.duration_s, 2),
        "requests": len(requests),
        "errors": sum(r.failed for r in requests),
        "ttft_ms": spread_ms(r.first_s - r.intended_s for r in requests if r.first_s is not None),
        "itl_ms": spread_ms(times_per_token_s(run)),
        "e2e_ms": spread_ms(r.end_s - r.intended_s for r in done if r.end_s is not None),
        "switches": len(run.mode_switches),
        "finished": len(done),
        "duration_s": round(run.duration_s, 3),
        "mean_e2e_s": round(mean_completion_s(run), 5),
        "switches_a_minute_max": most_within(run.mode_switches, 60.0),
        "half_tok_s": [round(rate, 2) for rate in halves_tok_s(run)],
        "in_flight_mean": round(mean_in_flight(run), 3),
        "requests_by_server": {
            name: sum(r.server == name for r in requests) for name in run.servers
        },
    }
    if len(curves) == 2:
        for key, oracle in zip(
            ("regret_o1", "regret_o3"), _oracles_tokens(run, curves), strict=True
        ):
            found[key] = round(oracle / run.tokens - 1, 5) if run.tokens else None
    return found


def times_per_token_s(run: Run) -> list[float]:
    """Return each answered request's time per token after the first."""
    return [
        (r.end_s - r.first_s) / (r.ask.output_tokens - 1)
        for r in run.requests
        if r.end_s is not None
        and r.first_s is not None
        and not r.failed
        and r.ask.output_tokens > 1
    ]


def p99_time_per_token_s(run: Run) -> float:
    """Return the 99th percentile of the requests' time per token."""
    return percentile(times_per_token_s(run), 0.99) or 0.0


def mean_completion_s(run: Run) -> float:
    """Return the mean time from intended start to end, that of unfinished ones being their age."""
    if not run.requests:
        return 0.0
    return sum(_age_s(r, run.duration_s) for r in run.requests) / len(run.requests)


def _age_s(request: Request, now: float) -> float:
    return (now if request.end_s is None else request.end_s) - request.intended_s


def mean_in_flight(run: Run) -> float:
    """Return the mean number of requests in flight."""
    return sum(n * s for n, s in run.in_flight_s.items()) / sum(run.in_flight_s.values())


def most_within(times_s: Sequence[float], window_s: float) -> int:
    """Return the most of these ascending times that lie within any window of this length."""
    most = first = 0
    for last, at in enumerate(times_s):
        while times_s[first] <= at - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def halves_tok_s(run: Run) -> tuple[float, float]:
    """Return the rates of the first and the second half."""
    half_s = run.duration_s / 2
    middle = tokens_at(run, half_s)
    return middle / half_s, (run.tokens - middle) / half_s


def tokens_at(run: Run, at_s: float) -> float:
    """Return the tokens made up to a look, which is the last one before `at_s`."""
    ticks = run.ticks
    place = min(floor(at_s / OBSERVE_S + 1e-9), len(ticks) - 1)
    return sum(ticks[place].tokens)


def lost_s(run: Run, reference: Run, from_s: float, to_s: float) -> float:
    """Return the seconds of the reference's mean rate that a run lost between two times."""
    made = tokens_at(run, to_s) - tokens_at(run, from_s)
    wanted = tokens_at(reference, to_s) - tokens_at(reference, from_s)
    return (wanted - made) / wanted * (to_s - from_s) if wanted else 0.0


def settle_s(run: Run, reference: Run, from_s: float, to_s: float) -> float:
    """Return how long after `from_s` a run first made SETTLED_SHARE of the reference's tokens over
    SETTLE_WINDOW_S; the whole time if it never did.
    """
    at_s = from_s
    while at_s + SETTLE_WINDOW_S <= to_s:
        end_s = at_s + SETTLE_WINDOW_S
        made = tokens_at(run, end_s) - tokens_at(run, at_s)
        wanted = tokens_at(reference, end_s) - tokens_at(reference, at_s)
        if made >= SETTLED_SHARE * wanted:
            return at_s - from_s
        at_s += OBSERVE_S
    return to_s - from_s


def _oracles_tokens(run: Run, curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the tokens of O1 and O3 over the run's own requests in flight."""
    spec, base = curves
    single = split = 0.0
    for n, seconds in run.in_flight_s.items():
        level = min(n, KNOWN_MAX)
        single += seconds * best_single_tok_s(curves, level)
        split += seconds * best_split(spec, base, level)[1]
    return single, split
