"""`crossover demo`: two simulated servers, the real router, one load, four policies.

Each policy gets the same requests in the same order from a closed loop that ramps from 1 to 64 and
back. All runs go through the router, so that its cost is in every figure.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from loadtest import results, verdict
from loadtest.children import ChildError
from loadtest.client import LoadClient, pool_of
from loadtest.endings import ended
from loadtest.engines import ENGINES
from loadtest.forecast import FIXED_POLICIES, ROUTED, Forecast, forecast
from loadtest.live import REFRESH_S, Look, Rate, View, decisions, make_view
from loadtest.load import Load
from loadtest.provenance import provenance
from loadtest.record import RunResult
from loadtest.rig import Rig
from loadtest.scenarios import SCENARIOS, Scenario, rise_and_fall
from loadtest.sim_server import MODEL_NAME
from loadtest.stats import summarise, timeline
from loadtest.target import Target
from loadtest.workload import CHAT_MIX, Workload
from router.core.types import Layout

RUNS = (*FIXED_POLICIES, ROUTED)
DEFAULT_SECONDS = 56.0
SECONDS_MIN, SECONDS_MAX = 4.0, 3600.0
TIMELINE_STEPS = 80


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. `run_s` is one run's length, in seconds."""

    scenario: Scenario
    layout: Layout
    run_s: float
    seed: int
    out: Path
    json: str

    @property
    def engine_s(self) -> float:
        """One run's length in engine time."""
        return self.run_s * self.scenario.clock

    @property
    def workload(self) -> Workload:
        """The requests, the same in every run."""
        return Workload(MODEL_NAME, CHAT_MIX, self.seed)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and what it cost each process, in CPU seconds; None where the system does not tell."""

    result: RunResult
    router_cpu_s: float | None
    engines_cpu_s: float | None
    engine_slipped_s: float


class Demo:
    """The runs, one after the other."""

    def __init__(self, options: Options, ahead: Forecast, view: View) -> None:
        self._options = options
        self._ahead = ahead
        self._view = view

    async def measure(self) -> dict[str, Measured]:
        """Start the engines and run every policy."""
        options = self._options
        self._view.say("Starting both simulated engines ...")
        measured = {}
        async with Rig(options.scenario, options.layout, options.out, options.seed) as rig:
            for number, name in enumerate(RUNS):
                measured[name] = await self._run(rig, name, number)
        return measured

    async def _run(self, rig: Rig, name: str, number: int) -> Measured:
        policy = self._ahead.policy if name == ROUTED else name
        self._view.say(f"Run {number + 1} of {len(RUNS)}: {name}")
        async with rig.router(name, policy, self._ahead.threshold) as router:
            slipped_s, engines_cpu_s = await rig.slipped_s(), rig.engines.cpu_s()
            router_cpu_s = router.process.cpu_s()
            result = await self._load(router.url, name, number)
            router.process.check()
            used = Measured(
                result,
                _used(router_cpu_s, router.process.cpu_s()),
                _used(engines_cpu_s, rig.engines.cpu_s()),
                await rig.slipped_s() - slipped_s,
            )
        await rig.idle()
        return used

    async def _load(self, url: str, name: str, number: int) -> RunResult:
        options = self._options
        pacer = rise_and_fall(options.run_s)
        target = Target.parse(url, "/v1/chat/completions")
        load = Load((target,), options.workload, pacer, cut_s=options.run_s)
        pool = pool_of(target)
        client = LoadClient(load, (pool,))
        rate = Rate(options.scenario.clock)
        run = asyncio.create_task(client.run())
        try:
            while not (await asyncio.wait({run}, timeout=REFRESH_S))[0]:
                progress = client.progress()
                share = min(progress.elapsed_s / options.run_s, 1.0)
                self._view.show(
                    Look(
                        run=name,
                        number=number + 1,
                        runs=len(RUNS),
                        seconds=options.run_s,
                        share=(number + share) / len(RUNS),
                        wanted=pacer.ramp.level(progress.elapsed_s),
                        progress=progress,
                        tok_s=rate.update(progress.elapsed_s, progress.tokens),
                        decisions=decisions(client.rows),
                    )
                )
            return await run
        finally:
            client.stop()
            pool.close()


def _used(before_s: float | None, after_s: float | None) -> float | None:
    return None if before_s is None or after_s is None else round(after_s - before_s, 3)


def run_figures(
    options: Options, ahead: Forecast, name: str, measured: Measured
) -> dict[str, object]:
    """Return one run as it stands in the results."""
    result, clock = measured.result, options.scenario.clock
    step_s = options.run_s / TIMELINE_STEPS
    line = asdict(timeline(result.rows, options.run_s, step_s, clock))
    ramp = rise_and_fall(options.engine_s).ramp
    lags = result.lags_s
    return summarise(result.rows, result.duration_s, clock) | {
        "policy": ahead.policy if name == ROUTED else name,
        "threshold": ahead.threshold if name == ROUTED else None,
        "model_tok_s": round(ahead.runs[name], 1),
        "cpu_s": {
            "client": round(result.cpu_s, 3),
            "router": measured.router_cpu_s,
            "engines": measured.engines_cpu_s,
        },
        "client_lag_ms": {
            "mean": round(sum(lags) / len(lags) * 1e3, 3),
            "max": round(max(lags) * 1e3, 3),
        },
        "engine_slipped_s": round(measured.engine_slipped_s, 3),
        "timeline": line | {"wanted": [ramp.level(at) for at in line["at_s"]]},
    }


def document(
    options: Options, ahead: Forecast, measured: Mapping[str, Measured], argv: Sequence[str]
) -> dict[str, object]:
    """Return the whole results document."""
    scenario = options.scenario
    runs = {name: run_figures(options, ahead, name, run) for name, run in measured.items()}
    engines = (scenario.spec, scenario.base)
    interpolated = any(ENGINES[name].interpolated for name in engines)
    made = provenance(argv, options.seed, clock=scenario.clock, engines=engines)
    return results.document(runs, made) | {
        "scenario": {
            "name": scenario.name,
            "title": scenario.title,
            "spec": scenario.spec,
            "base": scenario.base,
            "layout": options.layout.value,
            "clock": scenario.clock,
            "interpolated": interpolated,
        },
        "rivals": {name: round(rate, 1) for name, rate in ahead.equal_pairs.items()},
        "verdict": verdict.sentence(runs, ahead, options.layout),
        "notes": verdict.notes(ahead, scenario, interpolated),
        "warnings": verdict.warnings(runs, scenario.clock),
    }


def report(found: Mapping[str, object], stream: TextIO) -> None:
    """Print table, verdict, notes and warnings."""
    runs, notes, doubts = found["runs"], found["notes"], found["warnings"]
    assert isinstance(runs, dict)
    assert isinstance(notes, list)
    assert isinstance(doubts, list)
    print("", verdict.table(runs), "", found["verdict"], sep="\n", file=stream)
    for note in notes:
        print(f"Note: {note}.", file=stream)
    for doubt in doubts:
        print(f"Warning: {doubt}.", file=stream)


async def _measure(options: Options, ahead: Forecast, view: View) -> dict[str, Measured]:
    """Run the demo; SIGTERM and SIGHUP end it and its processes as Ctrl-C does."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await Demo(options, ahead, view).measure()


def _demo(options: Options, argv: Sequence[str]) -> int:
    import uvloop

    from loadtest.plots import draw_demo  # first of all: what is missing shows before the run

    stream = sys.stderr if options.json == "-" else sys.stdout
    options.out.mkdir(parents=True, exist_ok=True)
    results.check_writable(options.json)
    view = make_view(stream)
    try:
        view.say(f"{options.scenario.title}; {options.layout} GPUs; seed {options.seed}")
        view.say("Asking the engine models what to expect ...")
        ahead = forecast(options.scenario, options.layout, options.workload, options.engine_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(_measure(options, ahead, view))
        view.say("Drawing ...")
    finally:
        view.close()
    found = document(options, ahead, measured, argv)
    plots = draw_demo(found, options.out)
    results.write(options.json, found)
    report(found, stream)
    written = [*plots, *([] if options.json == "-" else [Path(options.json)])]
    print("Written:", *written, file=stream)
    return 1 if any(run.result.gave_up for run in measured.values()) else 0


def _seconds(text: str) -> float:
    value = float(text)
    if not SECONDS_MIN <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"must be {SECONDS_MIN:g} to {SECONDS_MAX:g}, not {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover demo`."""
    made = argparse.ArgumentParser(
        prog="crossover demo",
        description="Steer a rising and falling load between two simulated servers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scenarios:\n" + "\n".join(f"  {s.name:<12}{s.title}" for s in SCENARIOS.values()),
    )
    made.add_argument("--scenario", choices=list(SCENARIOS), default="h200-tree")
    made.add_argument(
        "--layout",
        choices=[layout.value for layout in Layout],
        default=Layout.DISJOINT.value,
        help="whether the two servers have GPUs of their own (default) or share them",
    )
    made.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        help=f"load in all, a quarter for each run (default {DEFAULT_SECONDS:g})",
    )
    made.add_argument("--seed", type=int, default=1, help="of lengths and prompts (default 1)")
    made.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR")
    made.add_argument(
        "--json", metavar="FILE", help="results; - is stdout (default DIR/results.json)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crossover demo`; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = parser().parse_args(arguments)
    options = Options(
        scenario=SCENARIOS[asked.scenario],
        layout=Layout(asked.layout),
        run_s=asked.seconds / len(RUNS),
        seed=asked.seed,
        out=asked.out,
        json=asked.json or str(asked.out / "results.json"),
    )
    return ended(
        "crossover demo",
        lambda: _demo(options, ["crossover", "demo", *arguments]),
        (ChildError, results.OutputError),
    )
