"""What a sweep found, as the results document. Pure: rounds in, JSON values out.

One run for each target and level, named `spec@8`: its figures are the medians of its rounds, its
counts their sums; `rounds` holds each round's own, `spread` the lowest and highest.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from loadtest import crossing, results
from loadtest.pacing import Ramp
from loadtest.record import RequestRow, RunResult
from loadtest.stats import summarise, timeline
from loadtest.steady import figures
from loadtest.sweep_plan import Drift, Visit, reference_of
from loadtest.validity import client_figures

SPEC, BASE = "spec", "base"
RATES = ("tok_s", "request_tok_s")
LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")
_COUNTS = ("tokens", "requests", "errors", "switches", "finished")
TIMELINE_STEPS = 120


@dataclass(frozen=True, slots=True)
class Setting:
    """What was asked for; seconds are engine time."""

    model: str
    targets: tuple[str, ...]
    levels: tuple[int, ...]
    rounds: int
    seconds: float
    warmup_s: float
    prompt_tokens: int
    output_tokens: int
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One visit: the run, and the stretch of it that counts, all in wall seconds."""

    visit: Visit
    result: RunResult
    start_s: float
    end_s: float
    began_s: float
    clock: float


@dataclass(frozen=True, slots=True)
class StepRun:
    """A load that changes with time, on one target; the ramp is in wall seconds."""

    target: str
    ramp: Ramp
    result: RunResult
    clock: float


def document(
    setting: Setting,
    visited: Sequence[tuple[Visit, Mapping[str, Any]]],
    step: StepRun | None,
    provenance: Mapping[str, object],
) -> dict[str, Any]:
    """Return the results document of a sweep, complete or not, of its visits' figures."""
    by_point: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    reference = []
    for visit, found in visited:
        if visit.round is not None:
            by_point.setdefault((visit.target, visit.concurrency), []).append(found)
        elif found["tok_s"] is not None:
            reference.append(found["tok_s"])
    points = [(t, n) for t in setting.targets for n in setting.levels if (t, n) in by_point]
    runs = {f"{t}@{n}": merge(t, n, by_point[t, n]) for t, n in points}
    curves = rates(runs)
    drift = Drift(reference_of(setting.targets, setting.levels), tuple(reference))
    crossover = crossing.find(curves.get(SPEC, {}), curves.get(BASE, {}))
    made = results.document(runs, provenance) | {
        "kind": "sweep",
        "setting": asdict(setting),
        "crossover": None
        if crossover is None
        else crossover.to_json() | {"sentence": crossing.sentence(crossover)},
        "against_better": _against_better(curves),
        "drift": drift.to_json(),
        "warnings": _warnings(setting, runs, drift),
    }
    if step is not None:
        made["step"] = step_figures(step)
    return made


def visit_figures(one: Measured) -> dict[str, Any]:
    """Return the figures of one visit's stretch, and what the client cost."""
    result, clock = one.result, one.clock
    end_s = min(one.end_s, result.duration_s)
    start_s = min(one.start_s, end_s)
    found: dict[str, Any] = {}
    if end_s > start_s and result.gave_up is None:
        found |= figures(result.rows, start_s, end_s, clock)
    else:  # it gave up, or lost a client process: its failures count, its rate would be wrong
        summed = summarise(result.rows, result.duration_s, clock)
        found |= summed | {"tok_s": None, "request_tok_s": None}
    return found | {
        "round": one.visit.round,
        "began_s": round(one.began_s * clock, 3),
        **client_figures(result),
    }


def merge(target: str, level: int, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a point's run: medians and spread of the rounds, sums of their counts."""
    made: dict[str, Any] = {"target": target, "concurrency": level}
    made |= {name: sum(one.get(name, 0) for one in rounds) for name in _COUNTS}
    spread: dict[str, Any] = {}
    for name in RATES:
        made[name], spread[name] = _middle([one[name] for one in rounds])
    for name in LATENCIES:
        shares = {share: _middle([one[name][share] for one in rounds]) for share in ("p50", "p99")}
        made[name] = {share: middle for share, (middle, _) in shares.items()}
        spread[name] = {share: ends for share, (_, ends) in shares.items()}
    kinds: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for one in rounds:
        kinds.update(one["error_kinds"])
        served.update(one["requests_by_server"])
    examples = sorted({text for one in rounds for text in one["error_examples"]})[:5]
    return made | {
        "error_kinds": dict(kinds),
        "error_examples": examples,
        "requests_by_server": dict(served),
        "spread": spread,
        "rounds": list(rounds),
    }


def _middle(values: Sequence[float | None]) -> tuple[float | None, list[float] | None]:
    known = [value for value in values if value is not None]
    return (round(median(known), 3), [min(known), max(known)]) if known else (None, None)


def rates(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """Return each target's tokens per second over its levels; what was not measured is left out."""
    found: dict[str, dict[float, float]] = {}
    for run in runs.values():
        if run["tok_s"]:
            found.setdefault(run["target"], {})[run["concurrency"]] = run["tok_s"]
    return found


def _against_better(curves: Mapping[str, Mapping[float, float]]) -> dict[str, dict[str, float]]:
    """Return each other target's rate over that of the better of spec and base, by level."""
    if SPEC not in curves or BASE not in curves:
        return {}
    spec, base = curves[SPEC], curves[BASE]
    return {
        name: {
            f"{n:g}": round(rate / max(spec[n], base[n]), 4)
            for n, rate in curve.items()
            if n in spec and n in base
        }
        for name, curve in curves.items()
        if name not in (SPEC, BASE)
    }


def _warnings(setting: Setting, runs: Mapping[str, Mapping[str, Any]], drift: Drift) -> list[str]:
    found = []
    if drift.moved:
        share = drift.moved_share or 0.0
        found.append(
            f"the reference point ({drift.reference.target} at {drift.reference.concurrency}) "
            f"moved by {share:.1%} during the sweep: differences of that size mean nothing"
        )
    if setting.interrupted:
        found.append("the sweep was stopped before its end: later points have fewer rounds or none")
    doubtful = [
        (name, one["invalid_because"][0])
        for name, run in runs.items()
        for one in run["rounds"]
        if one["invalid_because"] and not one["errors"]
    ]
    if doubtful:
        visits = sum(len(run["rounds"]) for run in runs.values())
        names = ", ".join(dict.fromkeys(name for name, _ in doubtful))
        found.append(
            f"{len(doubtful)} of {visits} visits are doubtful ({names}); for one, {doubtful[0][1]}"
        )
    for name, run in runs.items():
        gave_up = [one["gave_up"] for one in run["rounds"] if one["gave_up"] is not None]
        if gave_up:
            found.append(f"{name}: {len(gave_up)} visits gave no rate: {gave_up[0]}")
        if run["errors"]:
            kinds = ", ".join(f"{count} {kind}" for kind, count in run["error_kinds"].items())
            example = f": {run['error_examples'][0]}" if run["error_examples"] else ""
            found.append(f"{name}: {run['errors']} requests failed ({kinds}){example}")
        if run["e2e_ms"]["p50"] is None and run["tok_s"]:
            found.append(f"{name}: no request ended within the measured time: use more --seconds")
    return found


def step_figures(step: StepRun) -> dict[str, Any]:
    """Return the step run's figures, its timeline and the moments at which the server changed."""
    result, clock = step.result, step.clock
    total_s = step.ramp.points[-1][0]
    bin_s = total_s / TIMELINE_STEPS
    line = asdict(timeline(result.rows, total_s, bin_s, clock))
    return summarise(result.rows, result.duration_s, clock) | {
        "target": step.target,
        "points": [[round(at_s * clock, 3), level] for at_s, level in step.ramp.points],
        "timeline": line | {"wanted": [step.ramp.level(at_s / clock) for at_s in line["at_s"]]},
        "mode_switches_s": [round(at_s * clock, 3) for at_s in mode_switches(result.rows, bin_s)],
    }


def mode_switches(rows: Sequence[RequestRow], bin_s: float) -> list[float]:
    """Return when the server that gets most new requests changed, by steps of `bin_s`.

    Both are used at once where a policy splits; then this says when the larger share moved.
    """
    shares: dict[int, Counter[str]] = {}
    for row in rows:
        if row.server is not None:
            shares.setdefault(int(row.sent_s / bin_s), Counter())[row.server] += 1
    found: list[float] = []
    mode: str | None = None
    for place in sorted(shares):
        share = shares[place]
        leader = max(sorted(share), key=lambda name: share[name])
        if mode is None:
            mode = leader
        elif share[leader] > share[mode]:
            found.append(place * bin_s)
            mode = leader
    return found
