"""A router process that is looked at from outside: its memory, its files, its own count of work."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx

from loadtest.children import Child

_IN_FLIGHT = re.compile(r"^router_inflight_sequences\{.*\} (\S+)$", re.MULTILINE)
_ERROR = re.compile(r'"level": ?"error"', re.IGNORECASE)
REST_S = 90.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment. `at_s` is since the beginning of a phase."""

    at_s: float
    rss_bytes: int
    open_files: int


class Watched:
    """Looks at a router; `client` reaches it, `log` is what it writes."""

    def __init__(self, child: Child, client: httpx.AsyncClient, log: Path) -> None:
        self._log = log
        self._child = child
        self._client = client

    def sample(self, at_s: float) -> Sample:
        """Look at it now. ChildError if it is no more."""
        self._child.check()
        folder = Path(f"/proc/{self._child.pid}")
        lines = (folder / "status").read_text().splitlines()
        rss = next(line.split()[1] for line in lines if line.startswith("VmRSS:"))
        return Sample(at_s, int(rss) * 1024, len(list((folder / "fd").iterdir())))

    def errors(self) -> list[str]:
        """Return the lines in which it tells of faults of its own."""
        with self._log.open(errors="replace") as lines:
            return [line.strip() for line in lines if _ERROR.search(line)]

    async def leases(self) -> int:
        """Return the sequences in flight, by its own count."""
        text = (await self._client.get("/metrics")).text
        return sum(int(float(value)) for value in _IN_FLIGHT.findall(text))

    async def at_rest(self, files_max: int | None = None) -> tuple[int, Sample]:
        """Wait until nothing is in flight and no more files are open than that, within bounds.

        Return leases and what is seen then; without a bound, once the files are at their fewest.
        """
        deadline = monotonic() + REST_S
        fewest, settled = self.sample(0.0).open_files, 0
        while True:
            leases, seen = await self.leases(), self.sample(0.0)
            if files_max is None:
                settled = settled + 1 if seen.open_files >= fewest else 0
                fewest = min(fewest, seen.open_files)
                done = settled >= 10 and seen.open_files == fewest
            else:
                done = seen.open_files <= files_max
            if (done and not leases) or monotonic() > deadline:
                return leases, seen
            await asyncio.sleep(0.3)


def slope(samples: Sequence[Sample]) -> float:
    """Return bytes a second by which memory grew: least squares, 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    mean_s = sum(each.at_s for each in samples) / len(samples)
    mean_bytes = sum(each.rss_bytes for each in samples) / len(samples)
    spread = sum((each.at_s - mean_s) ** 2 for each in samples)
    together = sum((each.at_s - mean_s) * (each.rss_bytes - mean_bytes) for each in samples)
    return together / spread if spread else 0.0
