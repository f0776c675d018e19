"""Where figures come from: command, commit, this machine, its GPUs, and what the servers tell.

Of a server only the fields named here are kept: `/server_info` also holds its keys.
"""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = ("crossover-router", "fastapi", "httptools", "uvicorn", "uvloop")
_SECRET_FLAGS = ("--api-key",)
API_KEY_VARIABLE = "CROSSOVER_API_KEY"


def provenance(
    argv: Sequence[str], seed: int, *, clock: float = 1.0, engines: Sequence[str] = ()
) -> dict[str, object]:
    """Return what it takes to judge and to repeat a run. Keys given as flags are left out."""
    return {
        "command": redact(argv),
        "seed": seed,
        "clock": clock,
        "engines": list(engines),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _dirty(),
        "host": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "gpus": gpus(),
        },
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def redact(argv: Sequence[str]) -> str:
    """Return the command line without secrets."""
    words = list(argv)
    for at, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag in _SECRET_FLAGS:
            if equals:
                words[at] = f"{flag}=***"
            elif at + 1 < len(words):
                words[at + 1] = "***"
    return " ".join(words)


def gpus() -> list[str] | None:
    """Return this machine's GPUs: name, memory and driver; None if it has none that tells."""
    query = "--query-gpu=name,memory.total,driver_version"
    told = told_by("nvidia-smi", query, "--format=csv,noheader") or ""
    return [line.strip() for line in told.splitlines() if line.strip()] or None


def told_by(*command: str) -> str | None:
    """Return what a command says of this machine or this checkout; None if it cannot tell."""
    try:
        done = subprocess.run(  # noqa: S603
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git(*arguments: str) -> str | None:
    """Return what git says of the checkout this package runs from; None if it runs from none."""
    return told_by("git", *arguments)


def _dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
