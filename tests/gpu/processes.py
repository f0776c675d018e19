"""Processes that serve HTTP: started in a group of their own, awaited, watched, ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL_LINES = 45
END_S = 15


class StartError(Exception):
    """A server did not come up, or is not the server that was asked for."""


# Below the ephemeral ports, which any connection may take, and where SGLang's gRPC port, 10,000
# higher, is a port too.
_ports = iter(range(20_000 + os.getpid() % 5000, 32_000))


def free_port() -> int:
    """A port that nobody listens on, another one each time."""
    for port in _ports:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartError("no free port")


class Process:
    """A Python process that serves at `url`, its group, and its log."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        port: int,
        folder: Path,
        ready_path: str,
    ) -> None:
        self.name = name
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.started_at = time.monotonic()
        self._ready_path = ready_path
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str, timeout_s: float = 10) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as reply:
            return json.loads(reply.read())

    def post(self, path: str, body: Any = None, timeout_s: float = 60) -> bytes:
        """The reply's body."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode() if body is not None else b"",
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.read()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> bool:
        """Whether the path that tells so answers 200 now."""
        try:
            with urllib.request.urlopen(self.url + self._ready_path, timeout=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def wait_up(self, deadline: float) -> float:
        """Seconds until it was ready; StartError when the process ends or the deadline passes."""
        while not self.ready():
            if not self.alive:
                raise StartError(f"{self.name} ended at start:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} is not up in time:\n{self.tail()}")
            time.sleep(0.25)
        return round(time.monotonic() - self.started_at, 1)

    def cpu_s(self) -> float | None:
        """CPU seconds of the process itself, without its children; None where nobody tells."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log_size(self) -> int:
        """Bytes written to the log so far."""
        return self.log.stat().st_size

    def log_since(self, offset: int) -> str:
        """What was logged after the first `offset` bytes."""
        with self.log.open("rb") as stream:
            stream.seek(offset)
            return stream.read().decode(errors="replace")

    def tail(self) -> str:
        """The end of the log, lines cut to a readable length."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(line[:300] for line in lines)

    def complaints(self) -> str:
        """Tracebacks and errors in the log, the first few."""
        lines = self.log.read_text(errors="replace").splitlines()
        words = ("Traceback", "Error", "ERROR", "Failed", "exception", "out of memory")
        found = [line[:300] for line in lines if any(word in line for word in words)]
        return "\n".join(line for line in found if "server_args=" not in line)[:3000]

    def stop(self) -> None:
        """End the whole process group."""
        for sign, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def gpu(query: str) -> str | None:
    """One answer of nvidia-smi, None where there is none."""
    try:
        result = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
