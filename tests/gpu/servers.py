"""SGLang servers, started together and asked for their state; the plugin laid out for them."""

import shutil
import time
import tomllib
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu.arms import Arm, Site
from tests.gpu.figures import find_key
from tests.gpu.processes import ROOT, Process, StartError, free_port, gpu

FLUSH_TRIES = 200


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


class Server(Process):
    """One SGLang server."""

    def __init__(self, arm: Arm, site: Site, plugin: Path, log: Path) -> None:
        port = free_port()
        super().__init__(
            arm.name,
            site.command(arm, port, free_port()),
            site.server_environment(arm, plugin),
            log,
            port=port,
            folder=log.parent,
            ready_path="/health",
        )
        self.arm = arm

    def flush_cache(self) -> None:
        """Empty the prefix cache; the server refuses while a request is still being put away."""
        for _ in range(FLUSH_TRIES):
            try:
                self.post("/flush_cache", timeout_s=10)
            except urllib.error.HTTPError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"{self.arm.name} does not become idle")

    def running(self) -> int | None:
        """Requests that it decodes or prefills now."""
        first = (self.get("/v1/loads").get("loads") or [{}])[0]
        return first.get("num_running_reqs")

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

    def check(self, site: Site) -> None:
        """StartError unless the KV pool has the size that all arms were given, and a patch shows
        that it is live in the worker that the server really uses.
        """
        if "--max-total-tokens" in site.arguments:
            wanted = int(site.arguments[site.arguments.index("--max-total-tokens") + 1])
            memory = find_key(self.get("/server_info"), "memory_usage") or {}
            if abs(memory.get("token_capacity", 0) - wanted) > 64:
                raise StartError(f"{self.name}: KV pool {memory}, {wanted} tokens wanted")
        if self.arm.patched and (state := self.switch() or {}).get("state") != "active":
            raise StartError(f"{self.name}: the plugin is not active: {state}\n{self.tail()}")


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
            took[arm.name] = self.servers[arm.name].wait_up(deadline)
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
