"""Measures the engine plugin on one GPU: servers side by side, levels interleaved.

    python -m tests.gpu.engine_bench --out DIR --seconds 540 plain,chain,chain-patched

README.md beside this file says what a run needs and how long it takes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import checks, figures
from tests.gpu.arms import ACCEPT_LENGTH, GRAPH_SIZES, Arm, Site, arms
from tests.gpu.load import burst, prompts
from tests.gpu.measure import run_rounds, warm
from tests.gpu.plan import Stage, parse_stages
from tests.gpu.processes import gpu
from tests.gpu.servers import Fleet, Server, fleet, write_plugin
from tests.gpu.session import Session, make_site

SMOKE_GRAPH_SIZES = (1, 4, 8, 16, 32, 64)
SMOKE_STAGE = ("plain,tree-toggle,chain-toggle@1,32@1",)
START_LIMIT_S = 240
RAMP_PHASE_S = 5.0
RAMP_TOKENS = 64


class Run(Session):
    """A session that measures stages of arms."""

    def __init__(
        self, options: argparse.Namespace, site: Site, known: dict[str, Arm], scratch: Path
    ) -> None:
        super().__init__(options, site, scratch)
        self.known = known

    def stage(self, running: Fleet, stage: Stage, until: float) -> None:
        """Start the stage's servers, prove that they are what they should be, measure them."""
        self.say(f"stage {stage.number}: {', '.join(stage.arms)}")
        limit_s = min(START_LIMIT_S, self.left_s())
        wanted = [self.known[name] for name in stage.arms]
        self.starts.append(running.switch_to(wanted, self.options.stagger, limit_s))
        self.memory.append(gpu("--query-gpu=memory.used"))
        self.say(f"  up: {self.starts[-1]}  GPU memory {self.memory[-1]}")
        servers = [running.servers[name] for name in stage.arms]
        for server in servers:
            warm(server, self.site, stage.levels)
            server.check(self.site)
        self.say("  warm")
        self.compare_ids(servers)
        if self.options.smoke:
            self.strain(servers)
        run_rounds(stage, servers, self.site, self.rows, until, self.say)
        for server in servers:
            self.after(server)

    def compare_ids(self, servers: Sequence[Server]) -> None:
        """Every arm whose ids mean something, against plain."""
        plain = next((server for server in servers if server.arm.name == "plain"), None)
        for server in servers:
            exact = not server.arm.simulated or not self.site.simulates
            if plain is not None and server is not plain and exact:
                self.note(checks.compare_ids(server, plain, self.site))

    def strain(self, servers: Sequence[Server]) -> None:
        """More requests than any graph holds, prompts of many lengths."""
        level = max(self.site.levels) // 2 + 5
        for server in servers:
            work = [
                prompt[: 2 + index % len(prompt)]
                for index, prompt in enumerate(prompts(self.site, 2 * level, "strain"))
            ]
            done = burst(server.url, work, level, self.site.output_tokens // 4)
            outcome = {"check": "strain", "arm": server.arm.name, "ok": True, "level": level}
            self.note({**outcome, "requests": done.requests, "switch": server.switch()})

    def after(self, server: Server) -> None:
        """The ramp and the profile, where asked for and where time is left."""
        name = server.arm.name
        if name in self.options.ramp and self.left_s() > 4 * RAMP_PHASE_S:
            tokens = min(RAMP_TOKENS, self.site.output_tokens)
            self.attempt("ramp", name, checks.check_ramp, server, self.site, RAMP_PHASE_S, tokens)
        for arm, level in self.options.profile:
            if arm == name and self.left_s() > checks.PROFILE_WAIT_S:
                folder = self.scratch / f"trace_{name}_{level}"
                on_gpu = not self.options.dry_run_cpu
                self.attempt(
                    "profile", name, checks.profile, server, self.site, level, folder, on_gpu
                )

    def finish(self, error: str | None) -> None:
        """Write what was found."""
        rows = self.rows.rows
        found = {
            "levels": self.site.levels,
            "arms": {
                name: {"arguments": arm.arguments, "environment": dict(arm.environment)}
                for name, arm in self.known.items()
                if any(row["arm"] == name for row in rows)
            },
            "goals": figures.judge(rows),
        }
        self.write(error, found, figures.report(rows) if rows else "nothing was measured\n")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help="ARM[,ARM[,ARM]][@LEVEL,LEVEL...[@ROUNDS]]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540, help="budget of the whole run")
    parser.add_argument("--shares", default="", help="share of the time left, by stage: 0.6,1")
    parser.add_argument("--stagger", type=float, default=12, help="seconds between two starts")
    parser.add_argument("--tree-threshold", type=int, default=8)
    parser.add_argument("--chain-threshold", type=int, default=90)
    parser.add_argument("--accept-length", type=float, default=ACCEPT_LENGTH, help="simulated")
    parser.add_argument("--ramp", default=[], type=lambda text: text.split(","))
    parser.add_argument("--profile", default=[], type=_profiles, help="ARM@LEVEL[,ARM@LEVEL]")
    parser.add_argument("--smoke", action="store_true", help="short: starts, toggles, compares")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny models, no figures")
    return parser.parse_args(arguments)


def _profiles(text: str) -> list[tuple[str, int]]:
    pairs = (word.split("@") for word in text.split(","))
    return [(arm, int(level)) for arm, level in pairs]


def drive(run: Run, stages: Sequence[Stage], running: Fleet) -> None:
    """All stages in turn; each may use its share of the time that is left to it."""
    shares = [float(share) for share in run.options.shares.split(",") if share]
    for index, stage in enumerate(stages):
        share = shares[index] if index < len(shares) else 1.0
        run.stage(running, stage, time.monotonic() + share * run.left_s())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 when all ran and every check held, 1 otherwise, 2 for bad arguments."""
    options = read_options(arguments)
    known = arms(options.tree_threshold, options.chain_threshold, options.accept_length)
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        folder = Path(scratch)
        sizes = SMOKE_GRAPH_SIZES if options.smoke else GRAPH_SIZES
        site = make_site(options.dry_run_cpu, sizes, folder)
        words = options.stages or (SMOKE_STAGE if options.smoke else ())
        try:
            stages = parse_stages(words, list(known), site.levels)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        run = Run(options, site, known, folder)
        with fleet(site, folder, write_plugin(folder / "plugin")) as running:
            error = run.guarded(lambda: drive(run, stages, running))
            if error or options.smoke:
                run.show_logs(list(running.servers.values()))
            run.finish(error)
        run.say("done")
        return 1 if error or not all(one["ok"] for one in run.checks) else 0


if __name__ == "__main__":
    raise SystemExit(main())
