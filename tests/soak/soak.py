"""A router under disconnects and mixed traffic for a long time: at the end all is as it was.

    make soak ARGS="--minutes 30 --disconnects 100000"

A `crossover serve` process stands before two engines of this process, which fail in every way now
and then. First clients that leave at random; then clients that read to the end, some slowly, beside
such that leave, while settings are reloaded, servers drained, and engines die and return. Demanded:
no lease, no file more than before, memory flat in the second half of each part, no answer that
pretends to be whole. Needs Linux.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from os import kill
from pathlib import Path
from time import monotonic

import httpx

from loadtest.bar import bar
from loadtest.children import Child, ChildError, free_port
from loadtest.endings import EXIT_DONE, EXIT_INPUT, EXIT_NOTHING, ended, say
from loadtest.provenance import provenance
from loadtest.record import Progress
from loadtest.results import OutputError, check_writable, write
from tests.integration.rig import Engine
from tests.soak.traffic import Faults, Whims, ask, visit, visits
from tests.soak.watched import Sample, Watched, slope

RESULTS = Path(__file__).parent / "results" / "soak.json"
KEY = "soak"
SEED = 7
WARM_UP = 3000
ROUND = 500
BUSY_FILES = 150
WORKERS = 48
CHORE_S = 2.0
AWAY_S = 1.0
START_S = 30.0
SAMPLE_S = 0.5
POINTS_MAX = 60
ERRORS_SHOWN = 5
# In a phase's second half: until then a heap may grow to hold the most that was ever under way.
GROWTH_BYTES_MAX = 8 * 2**20

_SETTINGS = """\
spec_url: {spec}
base_url: {base}
policy: least-inflight
admin_key_file: {key}
idle_timeout_s: 2
first_byte_timeout_s: 5
connect_timeout_s: 1
probe_interval_s: 1
threshold: {threshold}
"""


@dataclass
class Soak:
    """A router, its engines, and what was counted."""

    watched: Watched
    child: Child
    client: httpx.AsyncClient
    engines: dict[str, Engine]
    settings: Path
    port: int
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    chores: Counter[str] = field(default_factory=Counter)

    def write_settings(self) -> None:
        """Write settings with a threshold that is another each time."""
        spec, base = (self.engines[name].url for name in ("spec", "base"))
        text = _SETTINGS.format(
            spec=spec, base=base, key=self.settings.with_name("key"),
            threshold=self.rng.randrange(1, 100),
        )  # fmt: skip
        self.settings.write_text(text)

    async def disconnects(self, count: int) -> None:
        """Have so many clients leave."""
        for engine in self.engines.values():
            engine.script = Whims(self.rng)
        for _ in range(0, count, ROUND):
            await visits(self.port, min(ROUND, count - self.done["left"]), self.rng, self.done)
            await self._caught_up()

    async def _caught_up(self) -> None:
        """Wait until the router has noticed who left: memory shows how many it had to hold."""
        deadline = monotonic() + START_S
        while self.watched.sample(0.0).open_files > BUSY_FILES and monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def mixed(self, seconds: float) -> None:
        """Have all sorts of clients for so long, and an operator who does chores."""
        for engine in self.engines.values():
            engine.script = Faults(self.rng)
        until = monotonic() + seconds
        await asyncio.gather(*(self._work(until) for _ in range(WORKERS)), self._operate(until))

    async def _work(self, until: float) -> None:
        while monotonic() < until:
            if self.rng.random() < 0.3:
                await visit(self.port, self.rng)
                self.done["left"] += 1
            else:
                self.done[await ask(self.port, self.rng)] += 1

    async def _operate(self, until: float) -> None:
        while monotonic() < until:
            name = self.rng.choice(("spec", "base"))
            chore = self.rng.choice(("reload", "drain", "restart"))
            if chore == "reload":
                self.write_settings()
                kill(self.child.pid, signal.SIGHUP)
            elif chore == "drain":
                await self._drain(name, on=True)
                await asyncio.sleep(AWAY_S)
                await self._drain(name, on=False)
            else:
                await self._restart(name)
            self.chores[chore] += 1
            self._forget()
            await asyncio.sleep(CHORE_S * self.rng.random())

    async def _drain(self, name: str, *, on: bool) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"server": name, "drain": on}
        (await self.client.post("/crossover/drain", json=body, headers=headers)).raise_for_status()

    async def _restart(self, name: str) -> None:
        before = self.engines[name]
        await before.stop()
        await asyncio.sleep(AWAY_S)
        self.engines[name] = engine = Engine(Faults(self.rng), port=before.port)
        await engine.start()

    def _forget(self) -> None:
        for engine in self.engines.values():
            engine.calls.clear()
            engine.aborts.clear()


@contextlib.asynccontextmanager
async def soaking(folder: Path, seed: int) -> AsyncIterator[Soak]:
    """Start engines and router, and end them."""
    rng = random.Random(seed)
    engines = {"spec": Engine(), "base": Engine()}
    for engine in engines.values():
        await engine.start()
    port, settings = free_port(), folder / "crossover.yaml"
    (folder / "key").write_text(KEY)
    arguments = ("-m", "router", "serve", "--port", str(port), "--config", str(settings))
    child = Child("router", arguments, folder / "router.log")
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as client:
        soak = Soak(
            Watched(child, client, folder / "router.log"),
            child,
            client,
            engines,
            settings,
            port,
            rng,
        )
        soak.write_settings()
        try:
            async with child:
                await _ready(child, client)
                yield soak
        finally:
            for engine in soak.engines.values():
                await engine.stop()


async def _ready(child: Child, client: httpx.AsyncClient) -> None:
    deadline = monotonic() + START_S
    while monotonic() < deadline:
        child.check()
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/readyz")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise ChildError(f"the router was not ready within {START_S:g} s:\n{child.last_words()}")


async def phase(
    soak: Soak, work: Awaitable[None], name: str, *, requests: int | None, seconds: float | None
) -> list[Sample]:
    """Do the work, and look at the router meanwhile."""
    began, samples = monotonic(), list[Sample]()
    task = asyncio.ensure_future(work)
    soak.done.clear()
    try:
        with bar(requests, seconds) as show:
            while not task.done():
                await asyncio.wait((task,), timeout=SAMPLE_S)
                at_s, done = monotonic() - began, soak.done.total()
                samples.append(soak.watched.sample(at_s))
                show(Progress(at_s, done, done, soak.done["wrong"] + soak.done["stuck"], 0, {}))
        task.result()
    finally:
        task.cancel()
    took = dict(sorted(soak.done.items()))
    say("soak", f"{name}: {took} in {monotonic() - began:.0f} s")
    return samples


async def run(minutes: float, disconnects: int, seed: int) -> dict[str, object]:
    """Soak a router and return what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        async with soaking(Path(folder), seed) as soak:
            warm_up = min(WARM_UP, disconnects or WARM_UP)
            await phase(soak, soak.disconnects(warm_up), "warm-up", requests=warm_up, seconds=None)
            if minutes:
                seconds = min(20.0, minutes * 60)
                await phase(soak, soak.mixed(seconds), "warm-up", requests=None, seconds=seconds)
            _, before = await soak.watched.at_rest()
            phases = {}
            if disconnects:
                work = soak.disconnects(disconnects)
                samples = await phase(soak, work, "disconnects", requests=disconnects, seconds=None)
                phases["disconnects"] = await _seen(soak, before, samples)
            if minutes:
                seconds = minutes * 60
                work = soak.mixed(seconds)
                samples = await phase(soak, work, "mixed", requests=None, seconds=seconds)
                phases["mixed"] = await _seen(soak, before, samples)
            return {"at_rest_before": _shown(before), "phases": phases}


async def _seen(soak: Soak, before: Sample, samples: Sequence[Sample]) -> dict[str, object]:
    """Return what a phase came to, once the router is at rest again."""
    done = dict(sorted(soak.done.items()))
    leases, after = await soak.watched.at_rest(before.open_files)
    late = samples[len(samples) // 2 :]
    per_s = slope(late)
    grown = per_s * (late[-1].at_s - late[0].at_s) if late else 0.0
    errors = soak.watched.errors()
    problems = {
        "leases": leases > 0,
        "open files": after.open_files > before.open_files,
        "memory": grown > GROWTH_BYTES_MAX,
        "errors of the router's own": bool(errors),
        "answers that pretend an end": done.get("wrong", 0) > 0,
        "answers that never ended": done.get("stuck", 0) > 0,
    }
    return {
        "duration_s": round(samples[-1].at_s, 1),
        "requests": sum(done.values()),
        "ended": done,
        "chores": dict(sorted(soak.chores.items())),
        "leases": leases,
        "at_rest": _shown(after),
        "rss_peak_mb": round(max(each.rss_bytes for each in samples) / 2**20, 1),
        "open_files_peak": max(each.open_files for each in samples),
        "rss_slope_kb_per_minute": round(per_s * 60 / 1024, 1),
        "rss_mb": _series(samples),
        "errors": errors[:ERRORS_SHOWN],
        "failed": [name for name, failed in problems.items() if failed],
    }


def _series(samples: Sequence[Sample]) -> list[float]:
    """Return memory over a phase, thinned to points at even distances."""
    step = -(-len(samples) // POINTS_MAX)
    return [round(each.rss_bytes / 2**20, 1) for each in samples[::step]]


def _shown(sample: Sample) -> dict[str, object]:
    return {"rss_mb": round(sample.rss_bytes / 2**20, 1), "open_files": sample.open_files}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; 1 if something was left behind."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of mixed traffic (30)")
    parser.add_argument("--disconnects", type=int, default=100_000, help="clients (100000)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", default=str(RESULTS), help="file for the results")
    options = parser.parse_args(argv)
    if options.minutes < 0 or options.disconnects < 0:
        parser.error("--minutes and --disconnects must be 0 or more")
    if not Path("/proc/self/status").exists():
        say("soak", "this system has no /proc to see a process's memory and files in")
        return EXIT_INPUT
    return ended("soak", lambda: _soak(options), (ChildError, OutputError))


def _soak(options: argparse.Namespace) -> int:
    check_writable(options.json)
    origin = provenance(sys.argv, options.seed)
    seen = asyncio.run(run(options.minutes, options.disconnects, options.seed))
    phases = seen["phases"]
    assert isinstance(phases, dict)
    write(options.json, {"schema": 1, **seen, "provenance": origin})
    failed = False
    for name, each in phases.items():
        failed = failed or bool(each["failed"])
        say("soak", f"{name}: {'FAILED ' + ', '.join(each['failed']) if each['failed'] else 'ok'}")
    say("soak", f"results: {options.json}")
    return EXIT_NOTHING if failed else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
