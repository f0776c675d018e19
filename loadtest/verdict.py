"""What may be said of the demo's runs, in words and as a table. Pure: results in, text out."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.forecast import ROUTED, SINGLE_SERVERS, Forecast
from loadtest.scenarios import Scenario
from router.core.types import Layout

SLIP_SHARE_MAX = 0.02
CLIENT_LAG_SHARE_MAX = 0.01
CLIENT_CPU_SHARE_MAX = 0.8
MODEL_SHARE_MIN = 0.93
PAYS_MIN = 1.01

Run = Mapping[str, Any]


def better_single(runs: Mapping[str, Run]) -> str:
    """Return which of the two servers alone made more tokens."""
    return max(SINGLE_SERVERS, key=lambda name: runs[name]["tokens"])


def sentence(runs: Mapping[str, Run], ahead: Forecast, layout: Layout) -> str:
    """Return the honest summary: what steering gave, and what the hardware alone would have."""
    single = better_single(runs)
    tok_s = {name: run["tok_s"] for name, run in runs.items()}
    ratio = _ratio(tok_s[ROUTED], tok_s[single])
    said = f"Routed made {ratio:.2f}x the tokens of the better single server ({single})"
    if layout is Layout.SHARED:
        least = _ratio(tok_s["least-inflight"], tok_s[single])
        pays = "gains a little" if ratio > PAYS_MIN else "does not pay"
        return (
            f"{said}, least-inflight {least:.2f}x. Both servers share one set of GPUs, and each "
            f"gets about half while both have work, so a switch costs full speed until the old "
            f"requests are done: on this load switching {pays}. What counts is the right server."
        )
    least = _ratio(tok_s[ROUTED], tok_s["least-inflight"])
    pairs = " or ".join(f"{rate:,.0f} ({name})" for name, rate in ahead.equal_pairs.items())
    against = _ratio(ahead.runs[ROUTED], max(ahead.equal_pairs.values()))
    gain = (
        "so the second GPU alone explains the gain"
        if against < 1.0
        else f"so {against - 1:.0%} is more than a second GPU alone gives"
    )
    return (
        f"{said} and {least:.2f}x of least-inflight, but on twice the GPUs. By the engine models "
        f"two equal servers would make {pairs} tok/s of this load, this mixed pair "
        f"{ahead.runs[ROUTED]:,.0f}, {against:.2f}x of the better equal pair: {gain}."
    )


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference else 0.0


def _policy_note(ahead: Forecast) -> str:
    if ahead.policy == "split":
        return (
            f"routed is the policy split: the first {ahead.threshold} requests in flight to spec, "
            f"the rest to base; by the engine models the best number for this load, in hindsight"
        )
    return (
        f"routed is the policy threshold: all to spec up to {ahead.threshold} in flight, where the "
        f"engine models cross, all to base above"
    )


def notes(ahead: Forecast, scenario: Scenario, interpolated: bool) -> list[str]:
    """Return what a reader has to know to read the figures."""
    found = [_policy_note(ahead)]
    if scenario.clock != 1.0:
        found.append(
            f"the engines run on a clock {scenario.clock:g} times as fast; all figures are in "
            f"engine time, so a millisecond of router or client counts {scenario.clock:g}"
        )
    if interpolated:
        found.append("these engine models are interpolated: lines through a few published points")
    return found


def warnings(runs: Mapping[str, Run], clock: float) -> list[str]:
    """Return what makes the figures of a run doubtful."""
    found = []
    for name, run in runs.items():
        seconds = run["duration_s"] / clock
        slip = run["engine_slipped_s"] / seconds
        if slip > SLIP_SHARE_MAX:
            found.append(
                f"{name}: an engine fell {slip:.1%} behind its model's clock; the machine is too "
                f"slow for these figures"
            )
        cpu = run["cpu_s"]["client"] / seconds
        lag, median = run["client_lag_ms"]["mean"] * clock, run["e2e_ms"]["p50"]
        if cpu > CLIENT_CPU_SHARE_MAX or (median and lag > CLIENT_LAG_SHARE_MAX * median):
            found.append(
                f"{name}: the client is the bottleneck ({cpu:.0%} of a core, {lag:.1f} ms late on "
                f"average)"
            )
        reached = run["tok_s"] / run["model_tok_s"]
        if reached < MODEL_SHARE_MIN:
            found.append(f"{name}: {reached:.0%} of what the engine models give without a network")
        if run["errors"]:
            kinds = ", ".join(f"{n} {kind}" for kind, n in run["error_kinds"].items())
            found.append(f"{name}: {run['errors']} requests failed ({kinds})")
    return found


_COLUMNS = ("", "tok/s", "x single", "TTFT ms", "p99", "ITL ms", "p99", "e2e ms", "p99")
_LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")
_COUNTS = ("requests", "errors", "switches")


def table(runs: Mapping[str, Run]) -> str:
    """Return the runs side by side."""
    single = runs[better_single(runs)]["tok_s"] or 1.0
    rows = [[*_COLUMNS, *_COUNTS]]
    for name, run in runs.items():
        spreads = [run[kind][share] for kind in _LATENCIES for share in ("p50", "p99")]
        rows.append(
            [
                name,
                f"{run['tok_s']:,.0f}",
                f"{run['tok_s'] / single:.2f}",
                *("-" if value is None else _short(value) for value in spreads),
                *(f"{run[count]:,}" for count in _COUNTS),
            ]
        )
    return aligned(rows)


def _short(value_ms: float) -> str:
    return f"{value_ms:.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns, the first to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
