"""`crossover-loadtest compare`: two results files, point by point, with intervals.

A ratio above 1 means that B is better: more tokens per second, or less latency. Where a point has
three rounds or more on both sides, the ratio of the medians gets a bootstrap interval; an interval
that holds 1 shows no difference.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.bootstrap import SAMPLES_MIN, Interval, Samples, interval
from loadtest.endings import ended
from loadtest.preflight import InputError
from loadtest.report import table
from loadtest.results import SCHEMA

# What can be compared, where a run has it, and whether more of it is better.
METRICS: Mapping[str, tuple[str, str | None, bool]] = {
    "tok_s": ("tok_s", None, True),
    "request_tok_s": ("request_tok_s", None, True),
    "ttft_p50": ("ttft_ms", "p50", False),
    "ttft_p99": ("ttft_ms", "p99", False),
    "itl_p50": ("itl_ms", "p50", False),
    "itl_p99": ("itl_ms", "p99", False),
    "e2e_p50": ("e2e_ms", "p50", False),
    "e2e_p99": ("e2e_ms", "p99", False),
}
FILE_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """One point of both files. `below` says that it misses the ratio demanded."""

    name: str
    a: float
    b: float
    ratio: float
    interval: Interval | None
    below: bool

    @property
    def verdict(self) -> str:
        """What may be said of it."""
        if self.interval is None:
            return "no interval: fewer than three rounds"
        if self.interval.holds(1.0):
            return "no difference shown"
        return "B is better" if self.ratio > 1 else "B is worse"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        found = self.interval
        return {
            "point": self.name,
            "a": self.a,
            "b": self.b,
            "ratio": round(self.ratio, 5),
            "interval": None if found is None else [round(found.low, 5), round(found.high, 5)],
            "confidence": None if found is None else round(found.confidence, 4),
            "verdict": self.verdict,
            "below": self.below,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All points that both files have, and the names of those that only one has."""

    metric: str
    points: tuple[Point, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def load(path: str) -> dict[str, Any]:
    """Read a results file; InputError says what is wrong with it."""
    try:
        if Path(path).stat().st_size > FILE_BYTES_MAX:
            raise InputError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB: no results file")
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise InputError(f"{path} is no results file: it has no schema")
    if found["schema"] != SCHEMA or isinstance(found["schema"], bool):
        raise InputError(f"{path} has schema {found['schema']!r}; this version reads {SCHEMA}")
    runs = found.get("runs")
    if not isinstance(runs, dict) or not all(isinstance(run, dict) for run in runs.values()):
        raise InputError(f"{path} has no runs to compare")
    return found


def check_alike(paths: tuple[str, str], a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise InputError if the files are of different models."""
    models = [model_of(found) for found in (a, b)]
    if None not in models and models[0] != models[1]:
        raise InputError(
            f"{paths[0]} measured {models[0]!r}, {paths[1]} measured {models[1]!r}: not comparable"
        )


def model_of(found: Mapping[str, Any]) -> str | None:
    """Return the model that was measured, as `sweep` or `run` say it; None if they do not."""
    loads = [found.get("setting"), *(run.get("load") for run in found["runs"].values())]
    told = (load.get("model") for load in loads if isinstance(load, dict))
    return next((model for model in told if isinstance(model, str)), None)


def pick(runs: Mapping[str, Any], target: str | None, path: str) -> dict[str, Any]:
    """Return the runs of one target by level, or with `target` None all runs by name."""
    if target is None:
        return dict(runs)
    found = {
        f"{run['concurrency']}" if "concurrency" in run else name: run
        for name, run in runs.items()
        if run.get("target", name) == target
    }
    if not found:
        known = ", ".join(sorted({str(run.get("target", name)) for name, run in runs.items()}))
        raise InputError(f"{path} has no target {target!r}, only: {known}")
    return found


def compare(
    a: Mapping[str, Any], b: Mapping[str, Any], metric: str, fail_below: float | None, seed: int
) -> Comparison:
    """Compare the runs that both have."""
    points = []
    only_a = [name for name in a if name not in b]
    only_b = [name for name in b if name not in a]
    for name in (name for name in a if name in b):
        pair = (samples(a[name], metric), samples(b[name], metric))
        if pair[0] and pair[1]:
            points.append(_point(name, pair, metric, fail_below, seed))
        else:
            (only_b if pair[1] else only_a).append(name)
    return Comparison(metric, tuple(points), tuple(only_a), tuple(only_b))


def samples(run: Mapping[str, Any], metric: str) -> list[float]:
    """Return a run's figure in each of its rounds, or its one figure; zeros and gaps left out."""
    key, share, _ = METRICS[metric]
    rounds = run.get("rounds")
    found = []
    for one in rounds if isinstance(rounds, list) and rounds else [run]:
        value = one.get(key) if isinstance(one, dict) else None
        if share is not None:
            value = value.get(share) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            found.append(float(value))
    return found


def _point(
    name: str,
    pair: tuple[list[float], list[float]],
    metric: str,
    fail_below: float | None,
    seed: int,
) -> Point:
    more_is_better = METRICS[metric][2]

    def ratio(of: Samples[float]) -> float:
        a, b = median(of[0]), median(of[1])
        return b / a if more_is_better else a / b

    found, band = ratio(pair), interval(pair, ratio, seed)
    missed = fail_below is not None and found < fail_below
    shown = band is None or not band.holds(1.0)
    return Point(name, median(pair[0]), median(pair[1]), found, band, missed and shown)


def text(found: Comparison, fail_below: float | None) -> str:
    """Return the comparison as a table and the sentences under it."""
    rows = [["point", f"A {found.metric}", f"B {found.metric}", "ratio", "interval", "verdict"]]
    for point in found.points:
        band = point.interval
        shown = (
            "-" if band is None else f"{band.low:.3f} to {band.high:.3f} ({band.confidence:.0%})"
        )
        fails = ", BELOW" if point.below else ""
        figures = (f"{point.a:.5g}", f"{point.b:.5g}", f"{point.ratio:.3f}")
        rows.append([point.name, *figures, shown, point.verdict + fails])
    lines = [table(rows), "", "A ratio above 1 means that B is better."]
    lines += [
        f"Only {side} has: {', '.join(names)}."
        for side, names in (("A", found.only_a), ("B", found.only_b))
        if names
    ]
    if fail_below is not None:
        below = [point.name for point in found.points if point.below]
        unsure = [
            point.name
            for point in found.points
            if point.interval and point.interval.holds(1.0) and point.interval.low < fail_below
        ]
        lines.append(
            f"Below {fail_below:g}: {', '.join(below)}."
            if below
            else f"No point is shown to be below {fail_below:g}."
        )
        if unsure:
            lines.append(
                f"Too noisy to exclude a ratio below {fail_below:g}: {', '.join(unsure)}: "
                f"measure more rounds."
            )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest compare`."""
    made = argparse.ArgumentParser(
        prog="crossover-loadtest compare",
        description="Compare two results files point by point.",
        epilog="With --a-target and --b-target, two targets of one sweep or of two: "
        "crossover-loadtest compare sweep.json sweep.json --a-target base --b-target router",
    )
    made.add_argument("a", metavar="A.json")
    made.add_argument("b", metavar="B.json")
    made.add_argument("--a-target", metavar="NAME", help="compare this target of A by level")
    made.add_argument("--b-target", metavar="NAME", help="with this one of B")
    made.add_argument("--metric", choices=list(METRICS), default="tok_s")
    made.add_argument(
        "--fail-below",
        type=float,
        metavar="RATIO",
        help="exit 1 if a point's ratio is below and a difference is shown",
    )
    made.add_argument("--seed", type=int, default=1, help="of the bootstrap")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _compare(asked: argparse.Namespace) -> int:
    if (asked.a_target is None) != (asked.b_target is None):
        raise InputError("--a-target and --b-target go together")
    if asked.fail_below is not None and not 0 < asked.fail_below <= 10:
        raise InputError(f"--fail-below must be above 0 and at most 10, not {asked.fail_below:g}")
    a, b = load(asked.a), load(asked.b)
    check_alike((asked.a, asked.b), a, b)
    found = compare(
        pick(a["runs"], asked.a_target, asked.a),
        pick(b["runs"], asked.b_target, asked.b),
        asked.metric,
        asked.fail_below,
        asked.seed,
    )
    if not found.points:
        raise InputError(
            f"no point of {asked.a} and {asked.b} has {asked.metric} in both; "
            f"A has {', '.join(found.only_a) or 'none'}, B has {', '.join(found.only_b) or 'none'}"
        )
    if asked.json:
        document = {
            "schema": SCHEMA,
            "metric": found.metric,
            "fail_below": asked.fail_below,
            "rounds_min": SAMPLES_MIN,
            "points": [point.to_json() for point in found.points],
            "only_a": list(found.only_a),
            "only_b": list(found.only_b),
        }
        print(json.dumps(document, indent=2))
    else:
        print(text(found, asked.fail_below), end="")
    return 1 if any(point.below for point in found.points) else 0


def main(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest compare`; return its exit code: 1 a point is below, 2 bad input."""
    asked = parser().parse_args(argv)
    return ended("crossover-loadtest compare", lambda: _compare(asked), (InputError,))
