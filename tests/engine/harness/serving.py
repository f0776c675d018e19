"""Real SGLang HTTP servers on the CPU, by the stock command, in a process group of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.children import free_port
from tests.engine.harness.laboratory import ROOT, engine_environment
from tests.engine.harness.scenario import DEFAULTS, Engine

START_LIMIT_S = 180.0
STOP_LIMIT_S = 2.0
POLL_S = 0.1

SERVING: Mapping[str, Any] = {
    "context_length": 1024,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "log_level": "info",
    "enable_metrics": True,
    "skip_server_warmup": True,
    "served_model_name": "tiny",
    "host": "127.0.0.1",
}


@dataclass
class ServerProcess:
    """A server that was started; `log` holds what it prints."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_until_healthy(self, path: str = "/health") -> None:
        """Return once it answers `path` with 200; raise with the end of its log if it does not."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return
            time.sleep(POLL_S)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End the serving process at once, as a crash would, and its children with it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end, then make it: SGLang drains at its leisure."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        self.kill()


def start(
    name: str,
    command: list[str],
    url: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Start a server from the interpreter of the tests."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**(environment or os.environ)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return ServerProcess(name, url, process, log)


def start_engine(
    engine: Engine, models: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start SGLang; it takes some 15 seconds to answer."""
    # SGLang refuses a port whose gRPC port, 10,000 higher, is none.
    port = next(port for _ in range(100) if (port := free_port()) <= 65_535 - 10_000)
    options = {**DEFAULTS, **SERVING, **engine.options, "port": port}
    options |= {"model_path": models / "target", "nccl_port": free_port()}
    if "speculative_algorithm" in options:
        options["speculative_draft_model_path"] = models / "draft"
    flags: list[str] = []
    for option, value in options.items():
        flag = "--" + option.replace("_", "-")
        if value is not False:
            flags += [flag] if value is True else [flag, str(value)]
    settings = engine_environment(
        {"SGLANG_ENABLE_SPEC_V2": "1" if engine.spec_v2 else "0", **(environment or {})}
    )
    return start(
        engine.name.replace("/", "-") + f"-{port}",
        ["-m", "sglang.launch_server", *flags],
        f"http://127.0.0.1:{port}",
        folder,
        settings,
    )
