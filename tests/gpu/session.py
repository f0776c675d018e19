"""One call of a driver: its time budget, its output folder, what it found, and where it ran."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.arms import Site, cpu_site, gpu_site
from tests.gpu.figures import Row
from tests.gpu.processes import ROOT, Process, gpu

RESERVE_S = 12  # to end the servers and write the results


class Rows:
    """Measurements, each written out as it is made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self._path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


class Session:
    """Keeps rows and outcomes of checks, tells the time left, and writes the results."""

    def __init__(self, options: argparse.Namespace, site: Site, scratch: Path) -> None:
        self.options = options
        self.site = site
        self.scratch = scratch
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

    def attempt(self, check: str, arm: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Note what the check finds. That it failed to run is a finding too; the run goes on."""
        try:
            self.note(function(*arguments))
        except Exception as failure:
            self.note({"check": check, "arm": arm, "ok": False, "failure": reasons(failure)})

    def guarded(self, work: Callable[[], None]) -> str | None:
        """Do the work; what made it fail, None if nothing did. The rows so far are kept."""
        try:
            work()
        except Exception as failure:
            error = "\n".join(reasons(failure))
            self.say(f"FAILED {error}")
            return error
        return None

    def show_logs(self, processes: Sequence[Process]) -> None:
        """What the servers complain of, and the ends of their logs."""
        for process in processes:
            print(f"--- {process.name}: complaints\n{process.complaints()}")
            print(f"--- {process.name}: end of the log\n{process.tail()}")

    def write(self, error: str | None, found: dict[str, Any], report: str) -> None:
        """The results, the report, and the servers' logs."""
        results = {
            "schema": 1,
            "error": error,
            "provenance": provenance(self.options),
            "site": {
                "prompt_tokens": self.site.prompt_tokens,
                "output_tokens": self.site.output_tokens,
                "arguments": self.site.arguments,
            },
            "starts_s": self.starts,
            "gpu_memory_used": self.memory,
            **found,
            "checks": self.checks,
            "rows": self.rows.rows,
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (self.out / "report.md").write_text(report)
        with tarfile.open(self.out / "logs.tgz", "w:gz") as archive:
            for log in sorted(self.scratch.glob("log_*.txt")):
                archive.add(log, log.name)
        print(report, flush=True)


def reasons(failure: BaseException) -> list[str]:
    """An exception in a line, or the first members of a group of them."""
    if isinstance(failure, BaseExceptionGroup):
        return [line for member in failure.exceptions[:3] for line in reasons(member)]
    return [f"{type(failure).__name__}: {failure}"]


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


def make_site(on_cpu: bool, graph_sizes: tuple[int, ...], folder: Path) -> Site:
    """The GPU, or the CPU with tiny models."""
    if not on_cpu:
        from tests.gpu.models import write_models

        write_models(folder / "models")
        return gpu_site(folder / "models", dict(os.environ), graph_sizes)
    from tests.engine.harness.laboratory import engine_environment

    environment = engine_environment()
    subprocess.run(
        [sys.executable, "-m", "cpu_engine.models", str(folder / "models")],
        check=True,
        env=environment,
    )
    return cpu_site(folder / "models", environment)
