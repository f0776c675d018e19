"""Child processes that always end: each in a process group of its own, its output in a log file."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

STOP_S = 5.0
LOG_LINES_SHOWN = 12


class ChildError(Exception):
    """A child that did not start, or ended when it should not have; the message is for the user."""


class Child:
    """A Python module run as a process, from `async with` to its end."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self._arguments = tuple(arguments)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Start it. The user's own CROSSOVER_* settings are not for it."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it and whatever it started: SIGTERM, and SIGKILL if that was not enough."""
        assert self._process is not None
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # Also when cancelled meanwhile, and for descendants that outlived the child.
            self._signal(signal.SIGKILL)
        await self._process.wait()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raise ChildError if it has ended."""
        assert self._process is not None
        if self._process.returncode is not None:
            raise ChildError(
                f"the {self.name} ended with code {self._process.returncode}:\n{self.last_words()}"
            )

    async def ended(self) -> None:
        """Wait until it ends by itself."""
        assert self._process is not None
        await self._process.wait()

    def cpu_s(self) -> float | None:
        """Return the CPU seconds it has used; None where the system does not tell."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def last_words(self) -> str:
        """Return the end of its log."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES_SHOWN:])

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def free_port() -> int:
    """Return a port of this host that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
