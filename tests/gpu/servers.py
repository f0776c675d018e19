"""Server processes of one stage: started together, awaited, asked for their state, ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu.arms import Arm, Site
from tests.gpu.figures import find_key

ROOT = Path(__file__).parents[2]
TAIL_LINES = 45
END_S = 15


class StartError(Exception):
    """A server did not come up, or is not the server that the arm describes."""


def write_plugin(folder: Path) -> Path:
    """Lay out the plugin as an installed wheel would be, so that SGLang finds its entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in ("router/core", "sglang_patch"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "router/__init__.py", folder / "router")
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


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


class Server:
    """One SGLang server process group and its log."""

    def __init__(self, arm: Arm, site: Site, plugin: Path, log: Path) -> None:
        self.arm = arm
        self.log = log
        self.started_at = time.monotonic()
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *site.command(arm, port, free_port())],
                env=site.server_environment(arm, plugin),
                cwd=log.parent,
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

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def wait_up(self, deadline: float) -> None:
        """Return once healthy; raise StartError when the process ends or the deadline passes."""
        while not self.healthy():
            if not self.alive:
                raise StartError(f"{self.arm.name} ended at start:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.arm.name} is not up in time:\n{self.tail()}")
            time.sleep(0.25)

    def flush_cache(self) -> None:
        """Empty the prefix cache; the server refuses while a request is still being put away."""
        for _ in range(40):
            try:
                self.post("/flush_cache", timeout_s=10)
            except urllib.error.HTTPError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"{self.arm.name} does not become idle")

    def step_times_ms(self, running: int) -> list[float]:
        """All decode step times that the server recorded with this many requests running."""
        recorded = find_key(self.get("/server_info"), "step_time_dict") or {}
        return [seconds * 1e3 for seconds in recorded.get(str(running), [])]

    def switch(self) -> dict[str, Any] | None:
        """The plugin's state as the server reports it, None from a server without it."""
        for path in ("/v1/loads?include=all", "/server_info"):
            found = find_key(self.get(path), "spec_switch")
            if found is not None:
                return found
        return None

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


class Fleet:
    """The servers that are up, by arm name."""

    def __init__(self, site: Site, folder: Path, plugin: Path) -> None:
        self._site = site
        self._folder = folder
        self._plugin = plugin
        self._generation = 0
        self.servers: dict[str, Server] = {}

    def switch_to(
        self, wanted: Sequence[Arm], stagger_s: float, limit_s: float
    ) -> dict[str, float]:
        """Keep what is wanted, end the others, start the missing; seconds that each start took."""
        names = {arm.name for arm in wanted}
        leaving = [name for name in self.servers if name not in names]
        for name in leaving:
            self.servers.pop(name).stop()
        if leaving:
            _wait_for_gpu_memory(len(self.servers))
        self._generation += 1
        missing = [arm for arm in wanted if arm.name not in self.servers]
        for index, arm in enumerate(missing):
            if index:
                time.sleep(stagger_s)  # the first compiles what the others then find compiled
            log = self._folder / f"log_{self._generation}_{arm.name}.txt"
            self.servers[arm.name] = Server(arm, self._site, self._plugin, log)
        took = {}
        deadline = time.monotonic() + limit_s
        for arm in missing:
            server = self.servers[arm.name]
            server.wait_up(deadline)
            took[arm.name] = round(time.monotonic() - server.started_at, 1)
        return took

    def stop(self) -> None:
        """End every server."""
        for server in self.servers.values():
            server.stop()
        self.servers.clear()


@contextmanager
def fleet(site: Site, folder: Path, plugin: Path) -> Iterator[Fleet]:
    """A fleet whose servers end with the block."""
    running = Fleet(site, folder, plugin)
    try:
        yield running
    finally:
        running.stop()


def _wait_for_gpu_memory(servers: int) -> None:
    """Wait until no more processes than the servers that stay hold the GPU (a scheduler each)."""
    for _ in range(40):
        processes = gpu("--query-compute-apps=pid")
        if processes is None or len(processes.split()) <= servers:
            return
        time.sleep(0.25)


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
