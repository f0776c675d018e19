"""`crossover-loadtest sweep`: targets side by side over concurrency, in interleaved rounds.

Every visit is a closed loop that ramps up, settles, and is then measured; only the measured stretch
gives figures. sweep_plan.py says in which order, steady.py which figures, sweep_document.py how
rounds become the results.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest import bench, report, results
from loadtest.bench import Bench
from loadtest.endings import EXIT_INTERRUPTED, ended, say
from loadtest.pacing import Ramp
from loadtest.preflight import InputError
from loadtest.provenance import provenance
from loadtest.record import RunResult
from loadtest.run_command import write_rows
from loadtest.run_flags import read_shape
from loadtest.runner import Show
from loadtest.server_facts import ServerFacts
from loadtest.shape import Shape
from loadtest.sweep_document import Measured, Setting, StepRun, document, visit_figures
from loadtest.sweep_plan import LEVELS_MAX, ROUNDS_MAX, TARGETS_MAX, Visit, plan

DEFAULT_LEVELS = (1, 2, 4, 8, 16, 32, 64)
# Of a visit's warm-up, so much ramps up, so that requests do not go in step; the rest settles.
RAMP_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Options:
    """What `sweep` was asked for. Seconds are engine time."""

    bench: Bench
    targets: Mapping[str, str]
    levels: tuple[int, ...]
    rounds: int
    seconds: float
    warmup_s: float
    step: Shape | None
    json: str | None
    rows: Path | None
    markdown: Path | None
    plots: Path | None


@dataclass(slots=True)
class Sweep:
    """The visits of a sweep and what they gave. `show` gets the progress of the whole."""

    options: Options
    clock: float
    stop: asyncio.Event
    show: Show
    visited: list[tuple[Visit, dict[str, Any]]] = field(default_factory=list)
    step_run: StepRun | None = None
    rows_error: results.OutputError | None = None
    _done_s: float = 0.0
    _failed: int = 0

    async def run(self) -> None:
        """Make every visit, until all are made or the user stops; then the step run, if any."""
        options = self.options
        for at, visit in enumerate(plan(tuple(options.targets), options.levels, options.rounds)):
            if self.stop.is_set():
                return
            await self._visit(at, visit)
        if options.step is not None and not self.stop.is_set():
            await self._step(options.step)

    async def _visit(self, at: int, visit: Visit) -> None:
        options = self.options
        warm_s, total_s = (
            seconds / self.clock
            for seconds in (options.warmup_s, options.warmup_s + options.seconds)
        )
        level = float(visit.concurrency)
        ramp = Ramp(((0.0, 1.0), (warm_s * RAMP_SHARE, level), (total_s, level)))
        began_s = self._done_s
        result = await self._load(visit.target, ramp, visit.round or 0, at)
        if self.stop.is_set():
            return  # a stretch cut short is no measurement
        # Figures only: the rows of a long sweep would fill the memory.
        measured = Measured(visit, result, warm_s, total_s, began_s, self.clock)
        self.visited.append((visit, visit_figures(measured)))
        name = f"{visit.target}-{visit.concurrency}"
        number = f"reference-{at}" if visit.round is None else f"round-{visit.round + 1}"
        self._keep_rows(f"{name}-{number}.jsonl", result)

    async def _step(self, step: Shape) -> None:
        target = list(self.options.targets)[-1]
        points = tuple((at_s / self.clock, level) for at_s, level in step.ramp.points)
        result = await self._load(target, Ramp(points), 0, bench.VISITS_MAX - 1)
        self.step_run = StepRun(target, Ramp(points), result, self.clock)
        self._keep_rows(f"{target}-step.jsonl", result)

    async def _load(self, target: str, ramp: Ramp, round_: int, visit: int) -> RunResult:
        options = self.options
        before_s, before_failed = self._done_s, self._failed
        result = await options.bench.measure(
            options.targets[target],
            ramp,
            options.bench.workload(round_, visit),
            self.stop,
            lambda at: self.show(
                replace(at, elapsed_s=before_s + at.elapsed_s, errors=before_failed + at.errors)
            ),
        )
        self._done_s += ramp.points[-1][0]
        self._failed += sum(row.ending is not None and row.ending.is_error for row in result.rows)
        return result

    def _keep_rows(self, name: str, result: RunResult) -> None:
        if self.options.rows is not None and self.rows_error is None:
            try:
                write_rows(str(self.options.rows / name), result)
            except results.OutputError as error:
                self.rows_error = error  # the figures come first


def planned_s(options: Options, clock: float) -> float:
    """Return how long the sweep takes, in wall seconds."""
    visits = len(plan(tuple(options.targets), options.levels, options.rounds))
    step_s = options.step.ramp.points[-1][0] if options.step else 0.0
    return (visits * (options.warmup_s + options.seconds) + step_s) / clock


async def _measure(options: Options, clock: float, show: Show) -> Sweep:
    with bench.stopped_by_signals() as stop:
        sweep = Sweep(options, clock, stop, show)
        await sweep.run()
        return sweep


def _sweep(options: Options, argv: Sequence[str]) -> int:
    import uvloop

    from loadtest.bar import bar
    from loadtest.sweep_plots import draw  # what is missing shows before the run

    _check_outputs(options)
    facts = {name: options.bench.facts(url) for name, url in options.targets.items()}
    _check_reachable(facts)
    clock = options.bench.clock_of(iter(facts.values()))
    with (
        bar(None, planned_s(options, clock)) as show,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        sweep = runner.run(_measure(options, clock, show))
    if not sweep.visited:
        raise InputError("stopped before anything was measured")
    setting = Setting(
        model=options.bench.model,
        targets=tuple(options.targets),
        levels=options.levels,
        rounds=options.rounds,
        seconds=options.seconds,
        warmup_s=options.warmup_s,
        prompt_tokens=options.bench.prompt_tokens,
        output_tokens=options.bench.output_tokens,
        interrupted=sweep.stop.is_set(),
    )
    made = provenance(argv, options.bench.seed, clock=clock)
    made["servers"] = {name: known.to_json() for name, known in facts.items()}
    found = document(setting, sweep.visited, sweep.step_run, made)
    text = report.markdown(found)
    if options.json is not None:
        results.write(options.json, found)
    if options.markdown is not None:
        results.write_text(options.markdown, text)
    if options.plots is not None:
        draw(found, options.plots)
    print(text, end="", file=sys.stderr if options.json == "-" else sys.stdout)
    if sweep.rows_error is not None:
        raise sweep.rows_error
    if sweep.stop.is_set():
        return EXIT_INTERRUPTED
    return 0 if all(run["tok_s"] for run in report.runs_of(found).values()) else 1


def _check_outputs(options: Options) -> None:
    for path in (options.json, options.markdown):
        if path is not None:
            results.check_writable(str(path))
    for folder in (options.rows, options.plots):
        if folder is not None:
            results.check_folder(folder)


def _check_reachable(facts: Mapping[str, ServerFacts]) -> None:
    """Warn of targets that do not answer; InputError if none does."""
    silent = {name: known.problem for name, known in facts.items() if known.problem is not None}
    lines = [f"{name}: {why}" for name, why in silent.items()]
    if len(silent) == len(facts):
        raise InputError("; ".join(lines))
    for line in lines:
        say("crossover-loadtest sweep", f"{line}; its requests will count as failed")


def _target(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (equals and url) or not name.replace("-", "").replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(
            f"{text!r}: a target is NAME=URL, for example spec=http://127.0.0.1:30001"
        )
    return name, url


def _step(text: str) -> Shape:
    shape = read_shape(text, high=bench.LEVEL_MAX)
    if shape.duration_s is None:
        raise argparse.ArgumentTypeError(f"{text!r}: the last level needs its seconds")
    return shape


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest sweep`."""
    made = argparse.ArgumentParser(
        prog="crossover-loadtest sweep",
        description="Measure targets side by side at rising concurrency, in interleaved rounds.",
        epilog="The targets named spec and base give the crossover; every other one is compared "
        "with the better of the two. example: crossover-loadtest sweep --model M "
        "--target spec=http://127.0.0.1:30001 --target base=http://127.0.0.1:30002 "
        "--target router=http://127.0.0.1:30000 --json sweep.json --plots plots",
    )
    made.add_argument(
        "--target",
        dest="targets",
        action="append",
        type=_target,
        required=True,
        metavar="NAME=URL",
        help="again for each target",
    )
    made.add_argument(
        "--concurrency",
        dest="levels",
        type=bench.levels,
        default=DEFAULT_LEVELS,
        metavar="N,N,...",
        help="default " + ",".join(map(str, DEFAULT_LEVELS)),
    )
    made.add_argument(
        "--rounds",
        type=bench.at_least_one,
        default=3,
        metavar="N",
        help="default 3, the fewest that give an interval",
    )
    made.add_argument(
        "--seconds",
        type=bench.positive,
        default=20.0,
        metavar="S",
        help="measured at each point (default 20)",
    )
    made.add_argument(
        "--warmup-s",
        type=bench.positive,
        default=10.0,
        metavar="S",
        help="before it, not counted; a few requests' time (default 10)",
    )
    made.add_argument(
        "--step",
        type=_step,
        metavar="SHAPE",
        help="afterwards, a step run of the last target, as in 1/20,64/20,1/20",
    )
    made.add_argument("--json", metavar="FILE", help="write the results; - is stdout")
    made.add_argument("--rows", type=Path, metavar="DIR", help="write every request as JSON lines")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    made.add_argument("--plots", type=Path, metavar="DIR", help="draw PNG and SVG")
    bench.add_arguments(made)
    return made


def _options(asked: argparse.Namespace) -> Options:
    targets = dict(asked.targets)
    if len(targets) < len(asked.targets):
        raise InputError("two targets have the same name")
    for value, most, what in (
        (len(targets), TARGETS_MAX, "targets"),
        (len(asked.levels), LEVELS_MAX, "levels"),
        (asked.rounds, ROUNDS_MAX, "rounds"),
    ):
        if value > most:
            raise InputError(f"{value} {what} are too many: {most} at most")
    made = bench.make_bench(asked)
    for url in targets.values():
        made.target(url)
    return Options(
        bench=made,
        targets=targets,
        levels=asked.levels,
        rounds=asked.rounds,
        seconds=asked.seconds,
        warmup_s=asked.warmup_s,
        step=asked.step,
        json=asked.json,
        rows=asked.rows,
        markdown=asked.markdown,
        plots=asked.plots,
    )


def main(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest sweep`; return its exit code: 1 unanswered points, 2 bad input."""
    asked = parser().parse_args(argv)
    return ended(
        "crossover-loadtest sweep",
        lambda: _sweep(_options(asked), ["crossover-loadtest", "sweep", *argv]),
        bench.MENDABLE,
    )
