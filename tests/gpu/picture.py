"""From rows to the picture: where two servers cross, what routing reaches, what a step loses."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tests.gpu.figures import Ratio, Row, ratio, table

SPEC, BASE, ROUTED = "spec-only", "base-only", "routed"
ASKED = 0.98  # of the better single server, at each steady level

Curve = Mapping[float, float]


def steady_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of steady levels."""
    return [row for row in rows if row["kind"] == "steady"]


def curves(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Median output tok/s by level, of each arm."""
    steady = steady_rows(rows)
    return {
        arm: medians_by_level([row for row in steady if row["arm"] == arm], "tok_s")
        for arm in dict.fromkeys(row["arm"] for row in steady)
    }


def medians_by_level(rows: Sequence[Row], value: str) -> dict[float, float]:
    """Median of a column at each level that has it, levels ascending."""
    groups: dict[float, list[float]] = {}
    for row in rows:
        if row[value] is not None:
            groups.setdefault(row["level"], []).append(row[value])
    return {level: statistics.median(groups[level]) for level in sorted(groups)}


def threshold(found: Mapping[str, Any] | None, levels: Sequence[int]) -> int:
    """The highest load at which `spec` is ahead, by a crossing as JSON of all these levels."""
    if found is None or found["ahead"] == "base":
        return 0
    return max(levels) if found["load"] is None else int(found["load"])


def rate(curve: Curve, load: float) -> float:
    """Tok/s at any load: straight lines through the levels and the origin, level beyond them."""
    points = [(0.0, 0.0), *((float(level), tok_s) for level, tok_s in sorted(curve.items()))]
    for (low, below), (high, above) in pairwise(points):
        if load <= high:
            return below + (above - below) * (load - low) / (high - low)
    return points[-1][1]


@dataclass(frozen=True, slots=True)
class Loss:
    """A step run against the better single server at the run's own load, at every moment.

    `tokens`: what that server would have made more in the same time; `seconds`: how much sooner it
    would have made the same; `share`: of its tokens. Drain included. Below 0: the run did better.
    """

    tokens: float
    seconds: float
    share: float


def loss(row: Row, spec: Curve, base: Curve) -> Loss:
    """Regret O1 of a step run: the integral of R*(n) - R over its time, n its own load."""
    bin_s = row["wall_s"] / len(row["at_s"])
    tokens = seconds = best_tokens = 0.0
    for at, made in enumerate(row["timeline_tok_s"]):
        load = sum(busy[at] for busy in row["in_flight"].values())
        best = max(rate(spec, load), rate(base, load))
        best_tokens += best * bin_s
        tokens += (best - made) * bin_s
        if best > 0:
            seconds += (1 - made / best) * bin_s
    return Loss(tokens, seconds, tokens / best_tokens if best_tokens else 0.0)


def phase_tokens(row: Row) -> list[float]:
    """Tokens of each phase of a step run, and of the drain after the last."""
    bin_s = row["wall_s"] / len(row["at_s"])
    ends = [sum(seconds for seconds, _ in row["phases"][: at + 1]) for at in range(3)]
    counts = [0.0] * (len(ends) + 1)
    for middle, tok_s in zip(row["at_s"], row["timeline_tok_s"], strict=True):
        counts[sum(middle >= end for end in ends)] += tok_s * bin_s
    return counts


def against_better(rows: Sequence[Row]) -> list[tuple[str, Ratio]]:
    """At each level: the better single server by its median, and routed against it."""
    known = curves(rows)
    found = []
    for level in sorted(known.get(ROUTED, {})):
        better = max((SPEC, BASE), key=lambda arm: known.get(arm, {}).get(level, 0.0))
        one = ratio(steady_rows(rows), ROUTED, better, level)
        if one is not None:
            found.append((better, one))
    return found


def judge(rows: Sequence[Row]) -> list[Row]:
    """Whether routed reaches what is asked of it at each level."""
    return [
        {
            "arm": ROUTED,
            "reference": better,
            "level": one.level,
            "asked": ASKED,
            "ratio": round(one.median, 3),
            "interval": [round(one.low, 3), round(one.high, 3)],
            "pairs": one.pairs,
            "met": one.median >= ASKED,
        }
        for better, one in against_better(rows)
    ]


def losses(rows: Sequence[Row]) -> list[Row]:
    """The loss of every step run, and its tokens by phase."""
    known = curves(rows)
    if not (SPEC in known and BASE in known):
        return []
    return [
        {
            "arm": row["arm"],
            "round": row["round"],
            **asdict(loss(row, known[SPEC], known[BASE])),
            "phase_tokens": phase_tokens(row),
            "all_tokens": row["tokens"],
            "wall_s": row["wall_s"],
            "switches": row["switches"],
            "straggler": row["straggler"],
        }
        for row in rows
        if row["kind"] == "step"
    ]


def report(rows: Sequence[Row]) -> str:
    """All figures of a call, as Markdown."""
    rounds = steady_rows(rows)
    parts = [("Steady levels: output tok/s, median", table(rounds, "tok_s", 0))]
    for what in ("ttft_ms", "itl_ms"):
        flat = [{**row, what: row[what]["p50"]} for row in rounds]
        parts.append((f"{what}, p50, median", table(flat, what, 2)))
    for process in dict.fromkeys(name for row in rounds for name in row["cpu"]):
        flat = [{**row, "cpu": row["cpu"].get(process)} for row in rounds]
        parts.append((f"CPU of {process}, cores, median", table(flat, "cpu", 2)))
    lines = [
        "| level | better | routed / better | interval | pairs | asked | met |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {one['level']} | {one['reference']} | {one['ratio']:.3f} "
        f"| {one['interval'][0]:.3f}..{one['interval'][1]:.3f} | {one['pairs']} | {one['asked']} "
        f"| {'yes' if one['met'] else 'NO'} |"
        for one in judge(rows)
    ]
    parts.append(("Routed against the better single server", "\n".join(lines)))
    columns = (
        "run|tokens|wall s|low, high, low, drain: tokens|lost tokens|lost s|lost share|switches"
    )
    lines = [f"| {columns.replace('|', ' | ')} |", "|---" * 8 + "|"]
    lines += [
        f"| {one['arm']} | {one['all_tokens']} | {one['wall_s']:.2f} "
        f"| {', '.join(f'{count:.0f}' for count in one['phase_tokens'])} | {one['tokens']:.0f} "
        f"| {one['seconds']:.2f} | {one['share']:.3f} | {one['switches']} |"
        for one in losses(rows)
    ]
    parts.append(("Step run against the better server at every moment", "\n".join(lines)))
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in parts) + "\n"
