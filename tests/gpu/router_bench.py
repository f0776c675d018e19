"""Measures two servers on one GPU and the router in front of them, as a client sees them.

    python -m tests.gpu.router_bench --out DIR --seconds 490 --spec tree --policy threshold

README.md beside this file says what a run needs and how long it takes.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadtest.workload import Lognormal
from router.core.types import Role
from tests.gpu import picture, streams
from tests.gpu.arms import GRAPH_SIZES, Arm, Site, arms
from tests.gpu.figures import Row
from tests.gpu.measure import in_turn, warm
from tests.gpu.processes import ROOT, Process, gpu
from tests.gpu.router_process import ROUTER, Router, own_environment
from tests.gpu.servers import Fleet, Server, fleet, write_plugin
from tests.gpu.session import Session, make_site

START_LIMIT_S = 240
ROUTER_START_S = 30
OVERHEAD_S = 0.7  # of a point, beside its load: what is left over is aborted, caches are emptied
ROUTED_SETTLE_S_A_REQUEST = 0.05
DRAIN_SHARE = 0.3  # of a step run, for what is left at its end
STAGE = 1
EXIT_BAD_INPUT = 2
POLICIES_WITH_FILE = ("marginal",)


@dataclass(frozen=True, slots=True)
class Times:
    """What is measured for how long, in seconds."""

    levels: tuple[int, ...]
    calibration: float
    direct_settle: float
    routed_settle: float
    routed_change: float
    window: float
    phases: tuple[tuple[float, int], ...]
    straggler_tokens: int

    def routed_settle_s(self, level: int, crossed: bool) -> float:
        """How long a level runs through the router before it is counted.

        The first requests may go to the server that it then leaves, and hold half of the GPU until
        they end: the longer the more they are. A level on the other side of the crossover than the
        one before it gets the time that a router on shared GPUs takes to be sure.
        """
        least_s = self.routed_change if crossed else self.routed_settle
        return max(least_s, ROUTED_SETTLE_S_A_REQUEST * level)

    def round_s(self, servers: int) -> float:
        """A round of all levels of so many servers and the router."""
        direct_s = servers * (self.direct_settle + self.window + OVERHEAD_S)
        settle_s = sum(self.routed_settle_s(level, crossed=False) for level in self.levels)
        settle_s += 2 * (self.routed_change - self.routed_settle)  # up, and down to the next round
        return settle_s + len(self.levels) * (direct_s + self.window + OVERHEAD_S)

    def least_s(self, servers: int) -> float:
        """The calibration, one round, and the steps."""
        step_s = (1 + DRAIN_SHARE) * sum(seconds for seconds, _ in self.phases)
        return self.calibration + self.round_s(servers) + step_s * (servers + 1)


GPU_TIMES = Times(
    levels=(1, 8, 32, 64, 128),
    calibration=40.0,
    direct_settle=1.2,
    routed_settle=3.0,
    routed_change=12.0,
    window=3.5,
    phases=((4, 1), (14, 64), (5, 1)),
    straggler_tokens=2000,
)
CPU_TIMES = Times(
    levels=(1, 2, 4),
    calibration=16.0,
    direct_settle=2.0,
    routed_settle=3.0,
    routed_change=5.0,
    window=3.0,
    phases=((5, 1), (8, 4), (5, 1)),
    straggler_tokens=100,
)


class MeasureError(Exception):
    """What is measured does not work."""


class Bench(Session):
    """A session that measures each server alone, the router, and a step."""

    def __init__(
        self, options: argparse.Namespace, site: Site, scratch: Path, times: Times
    ) -> None:
        super().__init__(options, site, scratch)
        self.times = times
        self.servers: dict[str, Server] = {}  # by role, `alone-NAME` for those without a router
        self.router: Router | None = None
        self.router_arguments: list[str] = []
        self.up_to = 0  # where the two servers cross
        self.routed_level = 0  # the router's last one
        self.calibration_file = self.out.resolve() / "calibration.json"
        self.calibrated: dict[str, Any] | None = None

    def drive(self, running: Fleet, wanted: Mapping[str, Arm]) -> None:
        """Everything in turn. A late run loses rounds, never a level or the step."""
        self.start(running, wanted)
        self.fit()
        self.start_router(self.calibrate())
        self.rounds(0, 1)
        self.steps()
        self.rounds(1, self.options.rounds)

    def start(self, running: Fleet, wanted: Mapping[str, Arm]) -> None:
        """All servers, side by side on the GPU."""
        self.say(f"starting {', '.join(arm.name for arm in wanted.values())}")
        limit_s = min(START_LIMIT_S, self.left_s())
        took = running.switch_to(list(wanted.values()), self.options.stagger, limit_s)
        self.starts.append(took)
        self.memory.append(gpu("--query-gpu=memory.used"))
        self.say(f"  up: {self.starts[-1]}  GPU memory {self.memory[-1]}")
        self.servers = {role: running.servers[arm.name] for role, arm in wanted.items()}
        for server in self.servers.values():
            warm(server, self.site, self.times.levels)
            server.check(self.site)
        self.say("  warm")

    def fit(self) -> None:
        """Shorten the windows if the calibration, a round and the steps would not fit."""
        times, servers = self.times, len(self.servers)
        needed_s = times.least_s(servers) + ROUTER_START_S / 3
        windows_s = times.window * len(times.levels) * (servers + 1)
        scale = 1 + (self.left_s() - needed_s) / windows_s
        self.times = replace(times, window=min(times.window, max(times.window * scale, 1.0)))
        self.say(f"  {self.left_s():.0f} s left, {needed_s:.0f} needed: {self.times}")

    def aims(self) -> list[streams.Aim]:
        """All that is measured: servers by themselves, and the router once it is there."""
        names = {"spec": picture.SPEC, "base": picture.BASE}
        processes: dict[str, Process] = dict(self.servers)
        aims = [
            streams.Aim(names.get(role, server.name), server.url, self.model, {role: server})
            for role, server in self.servers.items()
        ]
        if self.router is not None:
            watched = {ROUTER: self.router, **processes}
            aims.append(streams.Aim(picture.ROUTED, self.router.url, self.model, watched))
        return aims

    @property
    def model(self) -> str:
        """The name under which SGLang serves the model: its path."""
        return str(self.site.target)

    def steady(self, aim: streams.Aim, level: int, number: int) -> None:
        """One row of one level."""
        settle_s = self.times.direct_settle
        if aim.name == picture.ROUTED:
            crossed = (level > self.up_to) != (self.routed_level > self.up_to)
            settle_s = self.times.routed_settle_s(level, crossed)
            self.routed_level = level
        for server in self.servers.values():
            server.flush_cache()
        row = streams.steady(
            aim,
            streams.Renewed(level, self.site.prompt_tokens, self.site.output_tokens),
            settle_s=settle_s,
            window_s=self.times.window,
            seed=1000 * number + level,
        )
        where = {"kind": "steady", "stage": STAGE, "round": number, "arm": aim.name}
        self.rows.add({**where, **row, "switch": self.modes()})
        self.say(
            f"  {number} {level:>3} {aim.name:<14} {row['tok_s']:>9} tok/s  ttft "
            f"{row['ttft_ms']['p50']}  itl {row['itl_ms']['p50']} ms  errors {row['errors']}  "
            f"{row['in_flight']}  cpu {row['cpu']}"
        )
        self.blame(aim, row)

    def blame(self, aim: streams.Aim, row: Row) -> None:
        """Note failed requests; MeasureError if nothing came at all: going on is a waste."""
        if row["errors"]:
            failed = {"arm": aim.name, "errors": row["errors"], "such_as": row["error_examples"]}
            self.note({"check": "requests", "ok": False, **failed})
        if not row["tokens"]:
            raise MeasureError(f"{aim.name} made no token: {row['error_examples']}")

    def modes(self) -> dict[str, Any]:
        """What each patched server says of its switch."""
        return {role: s.switch() for role, s in self.servers.items() if s.arm.patched}

    def pair(self) -> dict[str, Server]:
        """The two servers that the router is put before, by role."""
        return {role.value: self.servers[role] for role in Role}

    def calibrate(self) -> int | None:
        """Measure the pair by `crossover-loadtest calibrate`, as an operator would; up to which
        load the spec server is the better one. None if it failed: the router then starts without.
        """
        more = self.out / "calibrate.json"
        urls = [word for role, at in self.pair().items() for word in (f"--{role}-url", at.url)]
        sizes = ("--prompt-tokens", self.site.prompt_tokens, "--output-tokens")
        command = [
            *("-m", "loadtest", "calibrate", "--layout", "shared", "--model", self.model, *urls),
            *("--concurrency", ",".join(map(str, self.times.levels)), *sizes),
            *(self.site.output_tokens, "--budget-s", self.times.calibration),
            *("--out", self.calibration_file, "--json", more),
        ]
        with (self.scratch / "log_calibrate.txt").open("w") as log:
            done = subprocess.run(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=own_environment(self.options.wheels),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=2 * self.times.calibration + ROUTER_START_S,
                check=False,
            )
        if done.returncode == EXIT_BAD_INPUT or not more.exists():
            self.note({"check": "calibrate", "ok": False, "exit": done.returncode})
            return None
        self.calibrated = json.loads(more.read_text())
        self.note({"check": "calibrate", "ok": True, "found": self.calibrated["sentence"]})
        return picture.threshold(self.calibrated["crossover"], self.times.levels)

    def start_router(self, up_to: int | None) -> None:
        """With what was just measured: a threshold, or a calibration file."""
        self.up_to = up_to or 0
        given = self.options.threshold if self.options.threshold is not None else up_to
        arguments = ["--layout", "shared", "--policy", self.options.policy]
        if self.options.policy in POLICIES_WITH_FILE:
            arguments += ["--calibration", str(self.calibration_file)] if up_to is not None else []
        elif given is not None:
            arguments += ["--threshold", str(given)]
        self.router_arguments = arguments + shlex.split(self.options.router_arguments)
        self.say(f"  router: {' '.join(self.router_arguments)}")
        log = self.scratch / "log_router.txt"
        self.router = Router(self.pair(), self.router_arguments, self.options.wheels, log)
        self.starts.append({ROUTER: self.router.wait_up(time.monotonic() + ROUTER_START_S)})

    def rounds(self, first: int, last: int) -> None:
        """Rounds of all levels and arms while one more fits."""
        longest_s = self.times.round_s(len(self.servers)) if first else 0.0
        for number in range(first, last):
            begin = time.monotonic()
            if longest_s > self.left_s():
                self.say(f"out of time after {number} of {last} rounds")
                return
            for index, level in enumerate(self.times.levels):
                for aim in in_turn(self.aims(), number + index):
                    self.steady(aim, level, number)
            longest_s = time.monotonic() - begin

    def steps(self) -> None:
        """The step, on each server by itself and routed."""
        site = self.site
        output = Lognormal(0.8 * site.output_tokens, 0.6, 4 * site.output_tokens)
        lengths = streams.Mixed(site.prompt_tokens, output, self.times.straggler_tokens)
        plan = streams.Step(self.times.phases, lengths)
        for aim in self.aims():
            for server in self.servers.values():
                server.flush_cache()
            row = streams.step(
                aim,
                plan,
                limit_s=max(self.left_s(), 1.2 * plan.ends_s[-1]),
                seed=7,
                look=self.look,
            )
            where = {"kind": "step", "stage": STAGE, "round": 0, "arm": aim.name}
            self.rows.add({**where, **row, "switch": self.modes()})
            self.say(
                f"  step {aim.name:<14} {row['tokens']} tokens in {row['wall_s']} s, switches "
                f"{row['switches']}, errors {row['errors']}, straggler {row['straggler']}"
            )
            self.blame(aim, row)

    def look(self) -> dict[str, object]:
        """What the servers and the router say of themselves now; nothing where one is late."""
        seen: dict[str, object] = {}
        try:
            for role, server in self.servers.items():
                seen[role] = server.running()
                if server.arm.patched:
                    seen[f"{role}_mode"] = (server.switch() or {}).get("mode")
            if self.router is not None:
                seen[ROUTER] = self.router.get("/crossover/state")["policy"]["mode"]
        except (OSError, ValueError, KeyError):
            pass
        return seen

    def finish(self, error: str | None) -> None:
        """Write what was found."""
        rows = self.rows.rows
        found = {
            "levels": self.times.levels,
            "servers": {
                role: {
                    "arm": server.arm.name,
                    "arguments": server.arm.arguments,
                    "environment": dict(server.arm.environment),
                }
                for role, server in self.servers.items()
            },
            "router": self.router_arguments,
            "calibrated": self.calibrated,
            "goals": picture.judge(rows),
            "step_losses": picture.losses(rows),
        }
        report = picture.report(rows) if rows else "nothing was measured\n"
        self.write(error, found, report)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=480, help="budget of the whole run")
    parser.add_argument("--spec", default="tree", help="arm of the speculating server")
    parser.add_argument("--base", default="plain", help="arm of the other")
    parser.add_argument("--alone", help="an arm that no router is put before")
    parser.add_argument("--policy", default="marginal", help="of the router")
    parser.add_argument("--threshold", type=int, help="of the router; else as measured")
    parser.add_argument("--router-arguments", default="", help="further flags of the router")
    parser.add_argument("--server-arguments", default="", help="further flags of all servers")
    parser.add_argument("--rounds", type=int, default=3, help="as many as fit")
    parser.add_argument("--stagger", type=float, default=12, help="seconds between two starts")
    parser.add_argument("--tree-threshold", type=int, default=8)
    parser.add_argument("--chain-threshold", type=int, default=90)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".sgl/wheels")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny models, no figures")
    return parser.parse_args(arguments)


def wanted_arms(options: argparse.Namespace) -> dict[str, Arm]:
    """The arm of each role; ValueError for one that there is not."""
    known = arms(options.tree_threshold, options.chain_threshold)
    asked = {"spec": options.spec, "base": options.base}
    if options.alone:
        asked["alone"] = options.alone
    unknown = [name for name in asked.values() if name not in known]
    if unknown or len(set(asked.values())) != len(asked):
        raise ValueError(f"{', '.join(asked.values())}: different arms of {', '.join(known)}")
    return {role: known[name] for role, name in asked.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 if all ran and no request failed, 1 otherwise, 2 for bad arguments."""
    options = read_options(arguments)
    try:
        wanted = wanted_arms(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # For this process, which loads, and the router: a server sees what it would see without.
    options.wheels = None if find_spec("httptools") else options.wheels.resolve()
    if options.wheels is not None:
        sys.path.append(str(options.wheels))
    with tempfile.TemporaryDirectory(prefix="router-bench-") as scratch:
        folder = Path(scratch)
        site = make_site(options.dry_run_cpu, GRAPH_SIZES, folder)
        site = replace(site, arguments=(*site.arguments, *shlex.split(options.server_arguments)))
        bench = Bench(options, site, folder, CPU_TIMES if options.dry_run_cpu else GPU_TIMES)
        with fleet(site, folder, write_plugin(folder / "plugin")) as running:
            try:
                failure = bench.guarded(lambda: bench.drive(running, wanted))
                if failure:
                    router = [] if bench.router is None else [bench.router]
                    bench.show_logs([*router, *running.servers.values()])
            finally:
                if bench.router is not None:
                    bench.router.stop()
            bench.finish(failure)
        bench.say("done")
        return 1 if failure or not all(one["ok"] for one in bench.checks) else 0


if __name__ == "__main__":
    raise SystemExit(main())
