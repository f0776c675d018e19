"""docker-compose.yml as docker compose reads it; its services as processes of this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import expandvars
import yaml
from compose_spec.models import ComposeSpecification

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


def example_environment() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read(
    environment: Mapping[str, str], path: Path = ROOT / "docker-compose.yml"
) -> dict[str, Any]:
    """A compose file, checked and with its variables filled in."""
    raw = yaml.safe_load(path.read_text())
    ComposeSpecification.model_validate(raw)
    filled: dict[str, Any] = _fill(raw, environment)
    return filled


def _fill(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return expandvars.expand(value, environ=environment)
    if isinstance(value, list):
        return [_fill(item, environment) for item in value]
    if isinstance(value, dict):
        return {key: _fill(item, environment) for key, item in value.items()}
    return value


class Node:
    """Services of the file as processes: names become 127.0.0.1, mounts become their sources."""

    def __init__(self, document: Mapping[str, Any], ports: Mapping[str, str]) -> None:
        self._services = document["services"]
        self._secrets = document["secrets"]
        self._ports = ports
        self._scratch = Path(tempfile.mkdtemp())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def up(self, *names: str) -> Iterator[None]:
        """Start services, wait until each is healthy by its own check, and end them."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self._process(name))
            for name in names:
                self.wait_healthy(name)
            yield

    def wait_healthy(self, name: str) -> None:
        """Run the service's own health check until it passes."""
        check = [self.here(part) for part in self._services[name]["healthcheck"]["test"][1:]]
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ran = subprocess.run(
                _command(check),
                env=_environment(self._scratch, self._own(name)),
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
            if ran.returncode == 0:
                return
            if time.monotonic() > deadline:
                log = (self._scratch / f"{name}.log").read_text()
                raise AssertionError(f"{name} is not healthy: {ran.stderr}\n{log}")

    @staticmethod
    def wait_for(url: str) -> None:
        """Ask a URL until it answers 200."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except OSError:
                assert time.monotonic() < deadline, f"{url} is not ready"
            else:
                return

    @contextmanager
    def _process(self, name: str) -> Iterator[None]:
        service = self._services[name]
        entry = service.get("entrypoint", ["crossover"])
        words = [self._mounted(service, self.here(word)) for word in (*entry, *service["command"])]
        with running(words, self._scratch / f"{name}.log", self._own(name)) as process:
            self._processes[name] = process
            yield

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as `docker compose exec` does: with the service's environment and files."""
        service = self._services[name]
        return subprocess.run(
            _command([self._mounted(service, word) for word in words]),
            env=_environment(self._scratch, self._own(name)),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a service's process a signal."""
        self._processes[name].send_signal(number)

    def change(self, name: str, path: str, more: str) -> None:
        """Add lines to a file that a service has mounted."""
        with Path(self._mounted(self._services[name], path)).open("a") as file:
            file.write(more)

    def _own(self, name: str) -> dict[str, str]:
        own = self._services[name].get("environment", {})
        return {key: self._secret(self.here(value)) for key, value in own.items()}

    def _secret(self, value: str) -> str:
        folder, _, name = value.rpartition("/")
        return str(self._secrets[name]["file"]) if folder == "/run/secrets" else value

    def here(self, text: str) -> str:
        """Return a text of the file with this machine's free ports in place of the containers'."""
        for container, local in self._ports.items():
            text = re.sub(rf"\b{container}\b", local, text)
        return re.sub(r"//(spec|base|router):", "//127.0.0.1:", text)

    def _mounted(self, service: Mapping[str, Any], word: str) -> str:
        """Return a copy of the file that a word names, with what is true of this machine in it."""
        mounts = [mount.split(":")[:2] for mount in service.get("volumes", ())]
        for source, target in mounts:
            if not word.startswith(f"{target}/"):
                continue
            text = self.here((ROOT / source / word.removeprefix(f"{target}/")).read_text())
            for volume, place in mounts:
                if "/" not in volume:
                    (self._scratch / volume).mkdir(exist_ok=True)
                    text = text.replace(place, str(self._scratch / volume))
            copy = self._scratch / Path(word).name
            copy.write_text(text)
            return str(copy)
        return word


@contextmanager
def running(
    words: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended at the end."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            _command(words),
            env=_environment(log.parent, environment or {}),
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(DEADLINE_S)


def _environment(home: Path, own: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), **own}


def _command(words: list[str]) -> list[str]:
    """Programs of the image are those of this virtual environment."""
    program, *rest = words
    local = Path(sys.executable).with_name(program)
    return [str(local) if local.exists() else program, *rest]


def free_ports(count: int) -> list[str]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
