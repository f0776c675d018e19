"""`crossover-loadtest calibrate`: the shortest measurement that gives the router its curves."""

import argparse
import asyncio
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest import bench, crossing, results
from loadtest.bench import Bench
from loadtest.calibration_points import (
    PROBE_TOKENS,
    CalibrationPlan,
    LevelFigures,
    interference,
    level_figures,
    plan,
    staircase,
    ttft_points,
)
from loadtest.endings import EXIT_INTERRUPTED, ended
from loadtest.pacing import Ramp
from loadtest.preflight import InputError
from loadtest.provenance import provenance
from loadtest.record import RequestRow, RunResult
from loadtest.report import short, table
from loadtest.runner import Show
from loadtest.server_facts import ServerFacts
from loadtest.workload import Recorded, Workload
from router.core.calibration import Calibration, ServerProfile
from router.core.types import Layout, Role

DEFAULT_LEVELS = (1, 2, 4, 8, 16, 32, 64)
# Servers with GPUs of their own may slow one another by so much before it is said.
DISJOINT_SLOWDOWN_MAX = 1.1
# A point whose bounds lie further apart, as a share of it, is said to be doubtful.
BOUNDS_SHARE_MAX = 0.25
_PROBE_OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What `calibrate` was asked for. Seconds are engine time."""

    bench: Bench
    urls: Mapping[Role, str]
    gpus: Mapping[Role, str | None]
    layout: Layout
    plan: CalibrationPlan
    out: str
    json: str | None


@dataclass(slots=True)
class Calibrating:
    """The loads of a calibration and what they gave, server by server."""

    options: Options
    clock: float
    facts: Mapping[Role, ServerFacts]
    stop: asyncio.Event
    show: Show
    levels: dict[Role, list[LevelFigures]] = field(default_factory=dict)
    together: dict[Role, LevelFigures] = field(default_factory=dict)
    singles: dict[Role, list[RequestRow]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _done_s: float = 0.0

    async def run(self) -> None:
        """Measure each server alone, then both at once."""
        for role in self.options.urls:
            await self._singles(role)
            await self._stairs(role)
        await self._both()

    async def _singles(self, role: Role) -> None:
        """Send prompts of several lengths one at a time, to an idle server."""
        context = self.facts[role].info.get("context_length")
        room = context - _PROBE_OUTPUT_TOKENS if isinstance(context, int) else PROBE_TOKENS[-1]
        # A word may be more than one token, and a template adds some.
        lengths = [n for n in PROBE_TOKENS if n <= room * 0.6] or [1]
        load = replace(
            self.options.bench.workload(0, 0),
            lengths=Recorded(tuple((n, _PROBE_OUTPUT_TOKENS) for n in lengths)),
        )
        ramp = Ramp(((0.0, 1.0), (self.options.plan.singles_s / self.clock, 1.0)))
        result = await self._load(role, ramp, load)
        self.singles[role] = result.rows

    async def _stairs(self, role: Role) -> None:
        made = self.options.plan
        ramp, holds = staircase(made.levels, made.holds_s, self.clock)
        result = await self._load(role, ramp, self.options.bench.workload(0, 1))
        if result.gave_up is None:  # else its rates would be wrong
            self.levels[role] = level_figures(result.rows, holds, result.duration_s, self.clock)

    async def _both(self) -> None:
        made = self.options.plan
        ramp, holds = staircase((made.together_level,), (made.together_s,), self.clock)
        found = await asyncio.gather(
            *(
                self._load(role, ramp, self.options.bench.workload(0, 2), shown=place == 0)
                for place, role in enumerate(self.options.urls)
            )
        )
        if any(result.gave_up is not None for result in found):
            return
        for role, result in zip(self.options.urls, found, strict=True):
            for figures in level_figures(result.rows, holds, result.duration_s, self.clock):
                self.together[role] = figures

    async def _load(
        self, role: Role, ramp: Ramp, workload: Workload, *, shown: bool = True
    ) -> RunResult:
        if self.stop.is_set():
            return RunResult([], 0.0, 0.0, array("d"))
        before_s = self._done_s
        if shown:
            self._done_s += ramp.points[-1][0]
        result = await self.options.bench.measure(
            self.options.urls[role],
            ramp,
            workload,
            self.stop,
            lambda at: self.show(replace(at, elapsed_s=before_s + at.elapsed_s)) if shown else None,
        )
        if result.gave_up is not None:
            self.problems.append(f"{role}: {result.gave_up}")
        failed = [row for row in result.rows if row.ending is not None and row.ending.is_error]
        if failed:
            self.problems.append(f"{role}: {len(failed)} requests failed: {failed[0].error}")
        return result


def mode_of(facts: ServerFacts, level: int) -> str | None:
    """Return whether a server that switches itself speculates at a level; None if it does not."""
    switch = facts.info.get("spec_switch")
    if not isinstance(switch, dict) or switch.get("state") not in ("armed", "active"):
        return None
    threshold = switch.get("threshold")
    if not isinstance(threshold, int | float) or isinstance(threshold, bool):
        return None
    return "on" if level <= threshold else "off"


def calibration(found: Calibrating) -> Calibration:
    """Return what was measured as the router's calibration."""
    options, seed = found.options, found.options.bench.seed
    servers = tuple(
        ServerProfile(
            role=role,
            engine_version=found.facts[role].version,
            gpus=options.gpus[role],
            tpot=tuple(
                level.point(seed, mode_of(found.facts[role], level.level))
                for level in found.levels[role]
            ),
            ttft=ttft_points(found.singles[role], found.clock, seed),
        )
        for role in options.urls
        if found.levels.get(role)
    )
    at = options.plan.together_level
    alone = {
        str(role): level
        for role, levels in found.levels.items()
        for level in levels
        if level.level == at
    }
    together = {str(role): level for role, level in found.together.items()}
    return Calibration(
        servers, options.bench.model, options.layout, interference(alone, together, seed)
    )


def crossover(found: Calibrating) -> crossing.Crossing | None:
    """Return where the two servers' rates cross, each alone."""
    curves = {
        role: {float(level.level): level.whole.tok_s for level in levels}
        for role, levels in found.levels.items()
    }
    return crossing.find(curves.get(Role.SPEC, {}), curves.get(Role.BASE, {}))


def warnings(found: Calibrating, made: Calibration) -> list[str]:
    """Return what makes the calibration doubtful."""
    said = list(found.problems)
    if found.stop.is_set():
        said.append("stopped before the end: the file holds what was measured until then")
    wide = [
        f"{server.role} at {point.sequences:.3g} ({(point.high_s - point.low_s) / point.s:.0%})"
        for server in made.servers
        for point in server.tpot
        if point.high_s - point.low_s > BOUNDS_SHARE_MAX * point.s
    ]
    if wide:
        said.append(
            f"bounds are wide for {', '.join(wide)}: something disturbed the servers or this "
            f"machine, or the budget is short"
        )
    known = made.interference
    if made.layout is Layout.DISJOINT and known and known.low > DISJOINT_SLOWDOWN_MAX:
        said.append(
            f"the layout is disjoint, yet a token takes {known.slowdown:.2f} times as long while "
            f"both servers work: do they share GPUs?"
        )
    return said


def text(found: Calibrating, made: Calibration) -> str:
    """Return the calibration for a person: the crossover first."""
    lines = [f"{crossing.sentence(crossover(found))} Each server alone.", ""]
    if found.clock != 1.0 or any(facts.simulation for facts in found.facts.values()):
        lines.insert(0, f"Simulated servers, clock x{found.clock:g}; times are engine time.")
    rows = [["requests in flight"]]
    rows += [[str(level)] for level in found.options.plan.levels]
    for server in made.servers:
        by_level = {figures.level: figures for figures in found.levels[server.role]}
        points = dict(zip(by_level, server.tpot, strict=True))
        rows[0] += [f"{server.role} tok/s", f"{server.role} ms per token"]
        for row in rows[1:]:
            level = int(row[0])
            point = points.get(level)
            if point is None:
                row += ["-", "-"]
                continue
            band = f"{short(point.low_s * 1e3)} to {short(point.high_s * 1e3)}"
            row += [short(by_level[level].whole.tok_s), f"{short(point.s * 1e3)} ({band})"]
    lines += [table(rows), ""]
    if made.interference is not None:
        known = made.interference
        lines.append(
            f"While both work, a token takes {known.slowdown:.2f} times as long "
            f"({known.low:.2f} to {known.high:.2f}), at {found.options.plan.together_level} "
            f"requests each."
        )
    lines += [f"Warning: {warning}." for warning in warnings(found, made)]
    return "\n".join(lines) + "\n"


def document(found: Calibrating, made: Calibration, argv: Sequence[str]) -> dict[str, object]:
    """Return the calibration with its crossover and where it comes from, for machines."""
    told = crossover(found)
    origin = provenance(argv, found.options.bench.seed, clock=found.clock)
    origin["servers"] = {str(role): facts.to_json() for role, facts in found.facts.items()}
    return {
        "schema": results.SCHEMA,
        "kind": "calibrate",
        "calibration": made.to_json(),
        "crossover": None if told is None else told.to_json(),
        "sentence": crossing.sentence(told),
        "warnings": warnings(found, made),
        "provenance": origin,
    }


async def _measure(
    options: Options, clock: float, facts: Mapping[Role, ServerFacts], show: Show
) -> Calibrating:
    with bench.stopped_by_signals() as stop:
        found = Calibrating(options, clock, facts, stop, show)
        await found.run()
        return found


def _calibrate(options: Options, argv: Sequence[str]) -> int:
    import uvloop

    from loadtest.bar import bar

    for path in (options.out, options.json):
        if path is not None:
            results.check_writable(path)
    facts = {role: options.bench.facts(url) for role, url in options.urls.items()}
    for known in facts.values():
        if known.problem is not None:
            raise InputError(known.problem)
    clock = options.bench.clock_of(iter(facts.values()))
    made = options.plan
    stairs_s = 2 * (sum(made.holds_s) + made.singles_s)
    with (
        bar(None, (stairs_s + made.together_s) / clock) as show,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(_measure(options, clock, facts, show))
    if not any(found.levels.values()):
        why = "; ".join(found.problems) or "stopped before the first level was done"
        raise InputError(f"nothing was measured: {why}")
    calibrated = calibration(found)
    results.write_text(Path(options.out), json.dumps(calibrated.to_json(), indent=1) + "\n")
    if options.json is not None:
        results.write(options.json, document(found, calibrated, argv))
    stream = sys.stderr if options.json == "-" else sys.stdout
    print(text(found, calibrated), f"Written: {options.out}", sep="", file=stream)
    if found.stop.is_set():
        return EXIT_INTERRUPTED
    return 0 if all(found.levels.get(role) for role in options.urls) else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest calibrate`."""
    made = argparse.ArgumentParser(
        prog="crossover-loadtest calibrate",
        description="Measure both servers, alone and at once, and write the file that "
        "`crossover serve --calibration` starts from. Nothing else should use them meanwhile.",
        epilog="example: crossover-loadtest calibrate --model M --layout shared "
        "--spec-url http://127.0.0.1:30001 --base-url http://127.0.0.1:30002 "
        "--out calibration.json",
    )
    for role in Role:
        made.add_argument(f"--{role}-url", required=True, metavar="URL")
        made.add_argument(
            f"--{role}-gpus", metavar="TEXT", help="its GPUs, as in the router's configuration"
        )
    made.add_argument("--layout", required=True, choices=[layout.value for layout in Layout])
    made.add_argument(
        "--budget-s", type=bench.positive, default=120.0, metavar="S", help="default 120"
    )
    made.add_argument(
        "--concurrency",
        dest="levels",
        type=bench.levels,
        default=DEFAULT_LEVELS,
        metavar="N,N,...",
        help="default " + ",".join(map(str, DEFAULT_LEVELS)),
    )
    made.add_argument("--out", default="calibration.json", metavar="FILE")
    made.add_argument("--json", metavar="FILE", help="more for machines; - is stdout")
    bench.add_arguments(made)
    return made


def _options(asked: argparse.Namespace) -> Options:
    made = bench.make_bench(asked)
    urls = {role: str(getattr(asked, f"{role}_url")) for role in Role}
    for url in urls.values():
        made.target(url)
    return Options(
        bench=made,
        urls=urls,
        gpus={role: getattr(asked, f"{role}_gpus") for role in Role},
        layout=Layout(asked.layout),
        plan=plan(asked.levels, asked.budget_s),
        out=asked.out,
        json=asked.json,
    )


def main(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest calibrate`; return its exit code: 1 incomplete, 2 bad input."""
    asked = parser().parse_args(argv)
    return ended(
        "crossover-loadtest calibrate",
        lambda: _calibrate(_options(asked), ["crossover-loadtest", "calibrate", *argv]),
        bench.MENDABLE,
    )
