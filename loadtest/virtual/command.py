"""`crossover-loadtest sim`: the router's decisions in virtual time, against all rivals."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest import results as results_file
from loadtest.endings import ended
from loadtest.provenance import provenance
from loadtest.reading import Arrival, InputFileError, read_trace
from loadtest.verdict import aligned
from loadtest.virtual import report
from loadtest.virtual.arms import CaseResult
from loadtest.virtual.bench import cases
from loadtest.virtual.decision import measure_decision
from loadtest.virtual.demands import reached
from loadtest.virtual.jobs import Job, run_jobs
from loadtest.virtual.mutations import MUTATIONS, Mutation
from loadtest.virtual.scenario import Scenario, ScenarioError, load, names

SEEDS = 5
SEEDS_MAX = 100


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest sim`."""
    made = argparse.ArgumentParser(
        prog="crossover-loadtest sim",
        description="Run the router's own steering in virtual time before simulated engines, and "
        "compare it with fixed rules. Exit code 1: a demanded figure is missed.",
        epilog=f"scenarios: {', '.join(names())}",
    )
    made.add_argument(
        "--scenario",
        action="append",
        metavar="NAME",
        help="a shipped scenario or the path of a YAML file; may be repeated (default: all)",
    )
    made.add_argument("--seeds", type=_seeds, default=SEEDS, metavar="N", help=f"default {SEEDS}")
    made.add_argument(
        "--trace",
        metavar="FILE",
        help="replay TIMESTAMP,ContextTokens,GeneratedTokens instead of the synthetic trace",
    )
    made.add_argument(
        "--mutations",
        action="store_true",
        help="instead: take parts of the steering away, each of which must make a figure miss",
    )
    made.add_argument("--processes", type=int, default=0, metavar="N", help="default: all cores")
    made.add_argument("--json", metavar="FILE", help="write the results; - is stdout")
    made.add_argument("--markdown", metavar="FILE", help="write the tables")
    made.add_argument("--plot", metavar="DIR", help="draw sim.png and sim.svg")
    return made


def _seeds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {SEEDS_MAX}, not {text}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest sim`; return its exit code: 0, 1 a figure missed, 2 bad input."""
    asked = parser().parse_args(argv)
    return ended(
        "crossover-loadtest sim",
        lambda: _sim(asked, argv),
        (ScenarioError, InputFileError, results_file.OutputError),
    )


def _sim(asked: argparse.Namespace, argv: Sequence[str]) -> int:
    for path in (asked.json, asked.markdown):
        if path is not None:
            results_file.check_writable(path)
    return _mutate(asked) if asked.mutations else _simulate(asked, argv)


def _simulate(asked: argparse.Namespace, argv: Sequence[str]) -> int:
    scenarios = [load(name) for name in asked.scenario or names()]
    rows = _trace(asked.trace, scenarios)
    draw = _drawing(asked.plot)
    start_s = time.monotonic()
    jobs = [
        (case, seed, seed == 1)
        for scenario in scenarios
        for case in cases(scenario, rows)
        for seed in range(1, asked.seeds + 1)
    ]
    found = run_jobs(jobs, _progress(), asked.processes)
    took_s = time.monotonic() - start_s
    figures = [*reached(found), measure_decision()]
    stream = sys.stderr if asked.json == "-" else sys.stdout
    if asked.json is not None:
        engines = sorted({s.params.name for scenario in scenarios for s in scenario.servers})
        made = provenance(["crossover-loadtest", "sim", *argv], 1, engines=engines)
        document = results_file.document(report.runs(found), made | {"seeds": asked.seeds})
        document |= {"simulated": True, "figures": report.demands_json(figures)}
        results_file.write(asked.json, document)
    if asked.markdown is not None:
        results_file.write_text(Path(asked.markdown), report.markdown(found, figures))
    for path in draw(found):
        print(f"Written: {path}", file=stream)
    print(aligned(report.demand_rows(figures)), file=stream)
    missed = [item.demand.name for item in figures if not item.met]
    print(
        f"sim: {len(figures) - len(missed)} of {len(figures)} figures met, {len(jobs)} cases and "
        f"seeds, {asked.seeds} seeds, {took_s:.0f} s, simulated"
        + (f"; missed: {', '.join(missed)}" if missed else ""),
        file=stream,
    )
    return 1 if missed else 0


def _drawing(folder: str | None) -> Callable[[Sequence[CaseResult]], list[Path]]:
    """Return what draws the results; what is missing shows now, not after the run."""
    if folder is None:
        return lambda _: []
    from loadtest.virtual.plot import draw

    results_file.check_folder(Path(folder))
    return lambda found: draw(found, Path(folder))


def _trace(path: str | None, scenarios: Sequence[Scenario]) -> tuple[Arrival, ...] | None:
    if path is None:
        return None
    if not any(scenario.demands for scenario in scenarios):
        raise ScenarioError("--trace needs a scenario with demands, such as trace-chain")
    rows, reading = read_trace(path)
    if reading.skipped:
        print(f"{reading.skipped} lines left out: {reading.examples[0]}", file=sys.stderr)
    return tuple(rows)


def _mutate(asked: argparse.Namespace) -> int:
    """Run all mutations; exit code 1 if one of them shows in no figure."""
    jobs: list[Job] = []
    parts: list[tuple[Mutation, slice, slice]] = []
    for mutation in MUTATIONS:
        begin = len(jobs)
        whole = [
            (case, seed, False) for case in mutation.cases() for seed in range(1, asked.seeds + 1)
        ]
        jobs += whole
        jobs += [(mutation.mutate(case), seed, first) for case, seed, first in whole]
        middle = begin + len(whole)
        parts.append((mutation, slice(begin, middle), slice(middle, len(jobs))))
    found = run_jobs(jobs, _progress(), asked.processes)
    unseen = []
    for mutation, whole_part, mutated_part in parts:
        pair = mutation.seen(found[whole_part], found[mutated_part])
        if pair is None:
            unseen.append(mutation.name)
            continue
        met, missed = pair
        print(
            f"{mutation.name}: {missed.demand.name} {missed.value:.3f} instead of {met.value:.3f} "
            f"at {missed.where}; limit {missed.demand.limit:g}"
        )
    print(
        f"sim: {len(MUTATIONS) - len(unseen)} of {len(MUTATIONS)} mutations seen"
        + (f"; not seen: {', '.join(unseen)}" if unseen else "")
    )
    return 1 if unseen else 0


def _progress() -> Callable[[int, int], None]:
    """Return what shows how far the jobs are: on a terminal only."""

    def show(done: int, total: int) -> None:
        print(f"\r{done} of {total}", end="" if done < total else "\r", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda *_: None
