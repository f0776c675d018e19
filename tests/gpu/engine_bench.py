"""Measures the engine plugin on one GPU: servers side by side, levels interleaved.

    python -m tests.gpu.engine_bench --out DIR --seconds 540 plain,chain,chain-patched

README.md beside this file says what a run needs and how long it takes.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import checks, figures
from tests.gpu.arms import Arm, Site, arms, cpu_site, gpu_site
from tests.gpu.load import burst, prompts
from tests.gpu.measure import Rows, run_rounds, warm
from tests.gpu.plan import Stage, parse_stages
from tests.gpu.servers import ROOT, Fleet, Server, StartError, fleet, gpu, write_plugin

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SMOKE_GRAPH_SIZES = (1, 4, 8, 16, 32, 64)
SMOKE_STAGE = ("plain,tree-toggle,chain-toggle@1,32@1",)
START_LIMIT_S = 240
RESERVE_S = 12  # to end the servers and write the results
RAMP_PHASE_S = 5.0
RAMP_TOKENS = 64


class Run:
    """One call of the driver: its time budget, its output folder, what it found."""

    def __init__(
        self, options: argparse.Namespace, site: Site, known: dict[str, Arm], scratch: Path
    ) -> None:
        self.options = options
        self.scratch = scratch
        self.site = site
        self.known = known
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = Rows(self.out / "rows.jsonl")
        self.checks: list[dict[str, Any]] = []
        self.starts: list[dict[str, float]] = []
        self.memory: list[str | None] = []
        self.began = time.monotonic()
        self.ends = self.began + options.seconds - RESERVE_S

    def say(self, text: str) -> None:
        """A line of progress, with the seconds gone."""
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def left_s(self) -> float:
        """Seconds until the results must be written."""
        return self.ends - time.monotonic()

    def note(self, outcome: dict[str, Any]) -> None:
        """Keep a check's outcome, and say it."""
        self.checks.append(outcome)
        brief = {key: value for key, value in outcome.items() if key not in ("samples", "kernels")}
        self.say(f"  {json.dumps(brief)[:700]}")

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
            check_pool(server, self.site)
            warm(server, self.site, stage.levels)
            check_active(server)
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

    def attempt(self, check: str, arm: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Note what the check finds. That it failed to run is a finding too; the run goes on."""
        try:
            self.note(function(*arguments))
        except Exception as failure:
            reasons = [f"{type(one).__name__}: {one}"[:300] for one in _flat(failure)]
            self.note({"check": check, "arm": arm, "ok": False, "failure": reasons})

    def write(self, error: str | None) -> None:
        """The results, the report, and the servers' logs."""
        rows = self.rows.rows
        results = {
            "schema": 1,
            "error": error,
            "provenance": provenance(self.options),
            "site": {
                "levels": self.site.levels,
                "prompt_tokens": self.site.prompt_tokens,
                "output_tokens": self.site.output_tokens,
                "arguments": self.site.arguments,
            },
            "arms": {
                name: {"arguments": arm.arguments, "environment": dict(arm.environment)}
                for name, arm in self.known.items()
                if any(row["arm"] == name for row in rows)
            },
            "starts_s": self.starts,
            "gpu_memory_used": self.memory,
            "checks": self.checks,
            "goals": figures.judge(rows),
            "rows": rows,
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        report = figures.report(rows) if rows else "nothing was measured\n"
        (self.out / "report.md").write_text(report)
        with tarfile.open(self.out / "logs.tgz", "w:gz") as archive:
            for log in sorted(self.scratch.glob("log_*.txt")):
                archive.add(log, log.name)
        print(report, flush=True)


def check_pool(server: Server, site: Site) -> None:
    """The KV pool must have the size that all arms were given."""
    if "--max-total-tokens" not in site.arguments:
        return
    wanted = int(site.arguments[site.arguments.index("--max-total-tokens") + 1])
    memory = figures.find_key(server.get("/server_info"), "memory_usage") or {}
    if abs(memory.get("token_capacity", 0) - wanted) > 64:
        raise StartError(f"{server.arm.name}: KV pool {memory}, {wanted} tokens wanted")


def check_active(server: Server) -> None:
    """A patch must show that it is live in the worker that the server really uses."""
    if server.arm.patched and (state := server.switch() or {}).get("state") != "active":
        raise StartError(f"{server.arm.name}: the plugin is not active: {state}\n{server.tail()}")


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, on what, by which command."""
    commit = os.environ.get("CROSSOVER_COMMIT")
    if commit is None:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = asked.stdout.strip() or None
    return {
        "commit": commit,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "gpu": gpu("--query-gpu=name,memory.total,driver_version"),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "sglang", "triton", "transformers")},
        "seed": "prompts from (stage, round, level); servers --random-seed 1",
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_site(options: argparse.Namespace, folder: Path) -> Site:
    """The GPU, or the CPU with tiny models."""
    if not options.dry_run_cpu:
        from tests.gpu.models import write_models

        write_models(folder / "models")
        sizes = SMOKE_GRAPH_SIZES if options.smoke else GRAPH_SIZES
        return gpu_site(folder / "models", dict(os.environ), sizes)
    from tests.engine.harness.laboratory import engine_environment

    environment = engine_environment()
    subprocess.run(
        [sys.executable, "-m", "cpu_engine.models", str(folder / "models")],
        check=True,
        env=environment,
    )
    return cpu_site(folder / "models", environment)


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
    known = arms(options.tree_threshold, options.chain_threshold)
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        folder = Path(scratch)
        site = make_site(options, folder)
        words = options.stages or (SMOKE_STAGE if options.smoke else ())
        try:
            stages = parse_stages(words, list(known), site.levels)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        run = Run(options, site, known, folder)
        error: str | None = None
        with fleet(site, folder, write_plugin(folder / "plugin")) as running:
            try:
                drive(run, stages, running)
            except Exception as failure:  # whatever failed: the rows so far are written
                error = "".join(f"{type(one).__name__}: {one}\n" for one in _flat(failure))
                run.say(f"FAILED {error}")
            finally:
                for server in running.servers.values():
                    if error or options.smoke:
                        print(f"--- {server.arm.name}: complaints\n{server.complaints()}")
                        print(f"--- {server.arm.name}: end of the log\n{server.tail()}")
                run.write(error)
        run.say("done")
        return 1 if error or not all(one["ok"] for one in run.checks) else 0


def _flat(failure: BaseException) -> list[BaseException]:
    """An exception, or the first members of a group of them."""
    if isinstance(failure, BaseExceptionGroup):
        return [one for member in failure.exceptions[:3] for one in _flat(member)]
    return [failure]


if __name__ == "__main__":
    raise SystemExit(main())
