"""Whether a run's figures may be believed: the client measures itself as it measures the servers.

A client that is late sees answers late. A run is invalid if the 99th percentile of the client's lag
exceeds 1% of the median latency from intended start to end, or if it has nothing to show.
"""

from statistics import median

from loadtest.record import Ending, RunResult
from loadtest.stats import percentile

LAG_SHARE_MAX = 0.01


def client_figures(result: RunResult) -> dict[str, object]:
    """Return what a run says of its client: CPU, lag, warm-up, and whether it is valid."""
    lags_s = result.lags_s
    reasons = doubts(result)
    busy = result.cpu_s / (result.duration_s * result.processes) if result.duration_s else None
    return {
        "valid": not reasons,
        "invalid_because": reasons,
        "interrupted": result.interrupted,
        "gave_up": result.gave_up,
        "client": {
            "processes": result.processes,
            "cpu_s": round(result.cpu_s, 3),
            "cpu_share_of_core": None if busy is None else round(busy, 4),
            "cpu_ms_per_request": (
                round(result.cpu_s * 1e3 / len(result.rows), 4) if result.rows else None
            ),
            "lag_ms": {
                "p50": _ms(percentile(lags_s, 0.50)),
                "p99": _ms(percentile(lags_s, 0.99)),
                "max": _ms(max(lags_s, default=None)),
            },
        },
        "warmup": {
            "requests": len(result.warmup),
            "errors": sum(row.ending is not None and row.ending.is_error for row in result.warmup),
            "excluded": True,
        },
    }


def doubts(result: RunResult) -> list[str]:
    """Return the reasons why a run is not valid; none if it is."""
    latencies = [
        row.end_s - row.intended_s
        for row in result.rows
        if row.ending is Ending.OK and row.end_s is not None
    ]
    if not latencies:
        return ["no request was answered"]
    lag_s, middle_s = percentile(result.lags_s, 0.99) or 0.0, median(latencies)
    if lag_s > LAG_SHARE_MAX * middle_s:
        reason = (
            f"the client was late by {lag_s * 1e3:.1f} ms (p99), more than {LAG_SHARE_MAX:.0%} of "
            f"the median latency of {middle_s * 1e3:.1f} ms: use more --processes or a machine "
            "with less to do"
        )
        return [reason]
    return []


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
