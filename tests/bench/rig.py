"""The rig: the harness on core 0, the routers on core 1, one of them under load at a time."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.children import free_port

HARNESS_CORE, ROUTER_CORE = 0, 1
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
START_S = 60
SETTLE_S = 6


class RigError(Exception):
    """The bench cannot run here; the text says what is missing."""


def build_harness(folder: Path) -> Path:
    """Compile the harness."""
    source, program = Path(__file__).with_name("harness.c"), folder / "harness"
    try:
        subprocess.run(
            ["gcc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(source)], check=True
        )
    except FileNotFoundError:
        raise RigError("gcc is needed to build the load harness") from None
    return program


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            for task in tasks:
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_ms(pids: Sequence[int]) -> float:
    """User and system time of the processes so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total * TICK_MS


def rss_mb(pids: Sequence[int]) -> float:
    """Resident memory of the processes."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * resource.getpagesize() / 2**20


@dataclass(frozen=True, slots=True)
class Peer:
    """A router under test: how to start it in front of two servers."""

    name: str
    command: tuple[str, ...]

    def filled(self, servers: Sequence[str], port: int) -> list[str]:
        """The command with its placeholders replaced."""
        values = {"first": servers[0], "second": servers[1], "port": port, "free": free_port()}
        return [word.format(**values) for word in self.command]


class Router:
    """A running router, alone on its core."""

    def __init__(self, peer: Peer, servers: Sequence[str], log: Path) -> None:
        self.peer = peer
        self.port = free_port()
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(ROUTER_CORE), *peer.filled(servers, self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_up(self) -> None:
        """Return once a completion goes through."""
        body = {"model": "m", "messages": [{"role": "user", "content": "slot=-1 seq=0"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=5) as reply:
                    reply.read()
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise RigError(f"{self.peer.name} does not serve:\n{end}")

    @property
    def pids(self) -> list[int]:
        return family(self._process.pid)

    def settle(self) -> None:
        """Wait until it has put the last run away, for a bounded time."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            before = cpu_ms(self.pids)
            time.sleep(0.25)
            if cpu_ms(self.pids) - before <= 2 * TICK_MS:
                return

    def stop(self) -> None:
        """End its process group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process.wait()


class Harness:
    """The load client and both stub servers, one process."""

    def __init__(self, program: Path, core: int | None = HARNESS_CORE) -> None:
        pinned = () if core is None else ("taskset", "-c", str(core))
        self._process = subprocess.Popen(
            [*pinned, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.servers = [f"http://127.0.0.1:{port}" for port in self._line()["ports"]]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RigError(f"the harness ended with status {self._process.wait()}")
        return json.loads(line)

    def run(self, port: int, pids: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        """One test against the router at `port`; the harness takes the CPU of its processes."""
        processes = {"port": port, "core": ROUTER_CORE, "pids": ",".join(map(str, pids))}
        words = " ".join(f"{key}={value}" for key, value in {**processes, **settings}.items())
        assert self._process.stdin is not None
        self._process.stdin.write(f"run {words}\n")
        self._line()
        memory = rss_mb(pids)
        result = self._line()
        foreign = max(0.0, result["core_busy_ms"] - result["cpu_ms"])
        return {
            **result,
            "rss_mb": round(memory, 1),
            "foreign_share": round(foreign / result["wall_ms"], 3),
        }

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def rig(peers: Sequence[Peer], folder: Path) -> Iterator[tuple[Harness, list[Router]]]:
    """Harness and routers, all up; all end with the block."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    harness = Harness(build_harness(folder))
    routers: list[Router] = []
    try:
        for peer in peers:
            routers.append(Router(peer, harness.servers, folder / f"{peer.name}.log"))
            routers[-1].wait_up()
        yield harness, routers
    finally:
        for router in routers:
            router.stop()
        harness.stop()


def installed(folder: Path, requirement: str) -> Path:
    """Python of a virtual environment that holds just this requirement, made once and kept."""
    done = folder / "ok"
    python = folder / "bin/python"
    if not done.exists():
        print(f"installing {requirement} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return python
