"""What is run of each case: the learnt policy, and who it is compared with.

Arms that a figure needs run on every seed, the others on the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from loadtest.virtual.bench import Bench, Case
from loadtest.virtual.record import Run
from loadtest.virtual.scenario import Start
from loadtest.virtual.summary import (
    figures,
    lost_s,
    mean_completion_s,
    p99_time_per_token_s,
    settle_s,
)
from router.core.types import Layout

SPEC_ONLY, BASE_ONLY, LEAST = "spec-only", "base-only", "least-inflight"
ROUND_ROBIN, KNOWN, SPLIT = "round-robin", "known-curves", "best split"
TWO_SPEC, TWO_BASE = "two spec", "two base"
SPILL, THRESHOLD = "best spill", "best threshold"
RIVALS = (
    *(SPEC_ONLY, BASE_ONLY, TWO_SPEC, TWO_BASE, LEAST, ROUND_ROBIN),
    *(THRESHOLD, SPILL, SPLIT, KNOWN),
)


def routed(start: Start) -> str:
    """Return the name of the learnt policy's arm."""
    return f"routed {start}"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All arms of a case on one seed.

    `arms` are figures by arm; `chosen` the thresholds found with hindsight; `losses`, of a course
    on disjoint GPUs, the seconds lost against known curves and the seconds to settle from each
    mark, by arm; `p99_s` the 99th percentile of time per token.
    """

    case: Case
    seed: int
    arms: Mapping[str, Mapping[str, Any]]
    chosen: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    p99_s: Mapping[str, float] = field(default_factory=dict)

    def tokens(self, arm: str) -> float:
        """Tokens that an arm made."""
        return float(self.arms[arm]["tokens"])

    def completion_s(self, arm: str) -> float:
        """Mean completion time of an arm, in seconds."""
        return float(self.arms[arm]["mean_e2e_s"])


def run_case(case: Case, seed: int, first: bool) -> CaseResult:
    """Run a case's arms on one seed; `first`: the rivals that no figure needs, too."""
    bench = Bench(case, seed)
    if case.demand is not None:
        return _run_replay(bench, first)
    if case.level is not None:
        return _run_level(bench, first)
    return _run_course(bench, first)


def _routed(bench: Bench) -> dict[str, Run]:
    return {routed(start): bench.routed(start) for start in bench.scenario.starts}


def _others(bench: Bench) -> dict[str, Run]:
    """Return rivals that are only shown."""
    spec, base = bench.scenario.servers
    runs = {ROUND_ROBIN: bench.round_robin()}
    if bench.scenario.layout is Layout.DISJOINT:
        runs[TWO_SPEC] = bench.pair(replace(spec, threshold=None))
        runs[TWO_BASE] = bench.pair(base)
    return runs


def _run_level(bench: Bench, first: bool) -> CaseResult:
    runs = _routed(bench)
    for policy in (SPEC_ONLY, BASE_ONLY):
        runs[policy] = bench.fixed(policy)
    disjoint = bench.scenario.layout is Layout.DISJOINT
    if disjoint:
        runs[SPLIT] = bench.split()
    if first:
        runs |= {LEAST: bench.fixed(LEAST), KNOWN: bench.known()} | _others(bench)
    elif bench.scenario.spec.threshold is not None:
        spec, base = bench.scenario.servers
        runs[TWO_SPEC] = bench.pair(replace(spec, threshold=None))
        runs[TWO_BASE] = bench.pair(base)
    return _result(bench, runs)


def _run_replay(bench: Bench, first: bool) -> CaseResult:
    runs = _routed(bench)
    for policy in (SPEC_ONLY, BASE_ONLY):
        runs[policy] = bench.fixed(policy)
    chosen = {}
    if bench.scenario.layout is Layout.DISJOINT:
        chosen[SPILL], runs[SPILL] = bench.best("split", mean_completion_s)
    if first:
        chosen[THRESHOLD], runs[THRESHOLD] = bench.best("threshold", mean_completion_s)
        runs |= {LEAST: bench.fixed(LEAST), KNOWN: bench.known()} | _others(bench)
    return _result(bench, runs, chosen)


def _run_course(bench: Bench, first: bool) -> CaseResult:
    runs = _routed(bench)
    chosen = {}
    shared = bench.scenario.layout is Layout.SHARED
    if first or shared:
        for policy in (SPEC_ONLY, BASE_ONLY):
            runs[policy] = bench.fixed(policy)
    if not shared:
        runs[KNOWN] = bench.known()
    if first:
        runs[LEAST] = bench.fixed(LEAST)
        for arm, policy in ((THRESHOLD, "threshold"), (SPILL, "split")):
            chosen[arm], runs[arm] = bench.best(policy, _fewest_tokens)
        runs |= _others(bench)
    ends_s = [*bench.scenario.marks_s, bench.scenario.duration_s]
    losses = {
        arm: tuple(
            (lost_s(run, runs[KNOWN], a, z), settle_s(run, runs[KNOWN], a, z))
            for a, z in pairwise(ends_s)
        )
        for arm, run in runs.items()
        if KNOWN in runs and arm.startswith("routed")
    }
    return _result(bench, runs, chosen, losses)


def _fewest_tokens(run: Run) -> float:
    return -run.tokens


def _result(
    bench: Bench,
    runs: Mapping[str, Run],
    chosen: Mapping[str, int] | None = None,
    losses: Mapping[str, tuple[tuple[float, float], ...]] | None = None,
) -> CaseResult:
    curves = bench.curves
    return CaseResult(
        bench.case,
        bench.seed,
        {arm: figures(run, () if arm.startswith("two ") else curves) for arm, run in runs.items()},
        chosen or {},
        losses or {},
        {arm: p99_time_per_token_s(run) for arm, run in runs.items()},
    )
