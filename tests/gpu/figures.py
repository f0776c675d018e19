"""From rows to figures: medians, paired ratios within a round, and what they show. Pure."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired ratios of two arms at one level: the median, and the interval min..max."""

    arm: str
    reference: str
    level: int
    median: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or that the interval holds 1."""
        if self.pairs < 2 or self.low <= 1 <= self.high:
            return NO_DIFFERENCE
        return "faster" if self.low > 1 else "slower"


@dataclass(frozen=True, slots=True)
class Goal:
    """What an arm is asked to reach; `at_least` None asks that it is not shown to be slower."""

    arm: str
    reference: str
    levels: tuple[int, ...]
    at_least: float | None


GOALS = (
    Goal("chain-patched", "chain", (1, 8, 32, 64), None),
    Goal("chain-patched", "chain", (128,), 1.0),
    Goal("chain-patched", "plain", (128,), 0.95),
    Goal("chain-patched", "plain", (256,), 0.93),
    Goal("chain-deferred", "chain", (1, 8, 32, 64), None),
    Goal("chain-deferred", "chain", (128,), 1.0),
    Goal("chain-deferred", "plain", (128,), 0.95),
    Goal("chain-deferred", "plain", (256,), 0.97),
    *(
        Goal("chain-goodput", other, (1, 8, 32, 64, 128, 256), 0.97)
        for other in ("chain", "chain-patched", "adaptive", "plain")
    ),
    Goal("tree-patched", "tree", (1,), None),
    Goal("tree-patched", "plain-noov", (32, 64), 0.85),
    Goal("tree-patched", "plain-noov", (128, 256), 0.95),
)


def medians(rows: Sequence[Row], value: str) -> dict[tuple[int, str, int], float]:
    """Median of a column for each (stage, arm, level) that has it."""
    groups: dict[tuple[int, str, int], list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault((row["stage"], row["arm"], row["level"]), []).append(row[value])
    return {key: statistics.median(values) for key, values in groups.items()}


def ratio(rows: Sequence[Row], arm: str, reference: str, level: int) -> Ratio | None:
    """Ratio of whole-wall throughput over the rounds in which both arms were measured."""
    measured = {
        (row["stage"], row["round"], row["arm"]): row["tok_s"]
        for row in rows
        if row["level"] == level
    }
    pairs = [
        tok_s / measured[stage, number, reference]
        for (stage, number, name), tok_s in measured.items()
        if name == arm and (stage, number, reference) in measured
    ]
    if not pairs:
        return None
    return Ratio(
        arm, reference, level, statistics.median(pairs), min(pairs), max(pairs), len(pairs)
    )


def ratios(rows: Sequence[Row], references: Iterable[str]) -> list[Ratio]:
    """Every arm against every reference that ran beside it, by level."""
    references = list(references)
    seen = dict.fromkeys(row["arm"] for row in rows)
    arms = [*references, *(arm for arm in seen if arm not in references)]
    levels = sorted({row["level"] for row in rows})
    found = (
        ratio(rows, arm, reference, level)
        for index, reference in enumerate(references)
        for arm in arms[index + 1 :]
        for level in levels
    )
    return [one for one in found if one is not None]


def judge(rows: Sequence[Row]) -> list[Row]:
    """The goals that these rows can answer, each met or not."""
    answers = []
    for goal in GOALS:
        for level in goal.levels:
            found = ratio(rows, goal.arm, goal.reference, level)
            if found is None:
                continue
            met = (
                found.verdict != "slower"
                if goal.at_least is None
                else found.median >= goal.at_least
            )
            answers.append(
                {
                    "arm": goal.arm,
                    "reference": goal.reference,
                    "level": level,
                    "asked": "not slower" if goal.at_least is None else goal.at_least,
                    "ratio": round(found.median, 3),
                    "interval": [round(found.low, 3), round(found.high, 3)],
                    "verdict": found.verdict,
                    "met": met,
                }
            )
    return answers


DECODE_LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([0-9.]+)"
)


def decode_throughputs(log: str, running: int) -> list[float]:
    """The server's own decode tok/s, of the intervals that ended with `running` requests."""
    return [float(match[2]) for match in DECODE_LINE.finditer(log) if int(match[1]) == running]


def find_key(value: Any, key: str) -> Any:
    """The first value under this key, at whatever depth of a JSON document, or None."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = find_key(item, key)
            if found is not None:
                return found
    return None


def table(rows: Sequence[Row], value: str, digits: int) -> str:
    """Markdown: levels down, arms (with their stage) across."""
    found = medians(rows, value)
    columns = list(dict.fromkeys((row["stage"], row["arm"]) for row in rows))
    lines = [
        "| level | " + " | ".join(f"{arm} ({stage})" for stage, arm in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for level in sorted({row["level"] for row in rows}):
        cells = (found.get((stage, arm, level)) for stage, arm in columns)
        shown = ("" if cell is None else f"{cell:.{digits}f}" for cell in cells)
        lines.append(f"| {level} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> str:
    """All figures of a run, as Markdown."""
    parts = [
        ("Output tok/s, whole wall time, median", table(rows, "tok_s", 0)),
        ("Decode-only tok/s, median", table(rows, "decode_tok_s", 0)),
        ("Decode step, ms, median", table(rows, "step_ms", 2)),
    ]
    lines = ["| arm | against | level | ratio | interval | pairs | shown |", "|" + "---|" * 7]
    lines += [
        f"| {one.arm} | {one.reference} | {one.level} | {one.median:.3f} "
        f"| {one.low:.3f}..{one.high:.3f} | {one.pairs} | {one.verdict} |"
        for one in ratios(rows, ("plain", "plain-noov", "chain", "tree"))
    ]
    parts.append(("Paired ratios of whole-wall throughput", "\n".join(lines)))
    goals = ["| arm | against | level | asked | ratio | met |", "|" + "---|" * 6]
    goals += [
        f"| {one['arm']} | {one['reference']} | {one['level']} | {one['asked']} "
        f"| {one['ratio']} | {'yes' if one['met'] else 'NO'} |"
        for one in judge(rows)
    ]
    parts.append(("Goals", "\n".join(goals)))
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in parts) + "\n"
