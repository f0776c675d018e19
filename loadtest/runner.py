"""Puts a load on its targets: the warm-up, then the measured run, in one client process or several.

Client processes share nothing but the moment at which they begin. Their rows are merged, so figures
come from all rows and never from each process's own percentiles.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from loadtest.client import LoadClient, pool_of
from loadtest.load import Load
from loadtest.record import Progress, RequestRow, RunResult

PROCESSES_MAX = 64
SHOW_EVERY_S = 0.2

Show = Callable[[Progress], None]


class Running(Protocol):
    """A load under way."""

    def progress(self) -> Progress:
        """Return how far it is."""
        ...

    def stop(self) -> None:
        """End it now; what was measured is kept."""
        ...


class Session:
    """One client process's warm-up and measured run, on the same connections."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._pools = tuple(pool_of(target) for target in load.targets)
        self._client = LoadClient(load, self._pools)
        self._stopped = False
        self._warmed: RunResult | None = None
        self._warm_began = 0.0

    async def warm(self) -> None:
        """Send the warm-up's requests and wait for their ends."""
        if self._load.warmup.requests and not self._stopped:
            self._client = LoadClient(self._load.warming(), self._pools)
            self._warmed = await self._client.run()
            self._warm_began = self._client.began

    async def run(self, began: float | None = None) -> RunResult:
        """Run the load from `began` on the monotonic clock; nothing if the warm-up gave up."""
        warmed, began_warm = self._warmed, self._warm_began
        if warmed is not None and (warmed.gave_up or warmed.interrupted):
            _shift(warmed.rows, -warmed.duration_s)
            return replace(warmed, rows=[], duration_s=0.0, warmup=warmed.rows)
        self._client = LoadClient(self._load, self._pools)
        if self._stopped:
            self._client.stop()
        result = await self._client.run(began)
        if warmed is None:
            return result
        _shift(warmed.rows, began_warm - self._client.began)
        return replace(result, warmup=warmed.rows)

    def progress(self) -> Progress:
        """Return how far the warm-up or the run is."""
        warming = self._client.load is not self._load
        return replace(self._client.progress(), warming=warming)

    def stop(self) -> None:
        """End it now; what was measured is kept."""
        self._stopped = True
        self._client.stop()

    def close(self) -> None:
        """Close the connections that are kept."""
        for pool in self._pools:
            pool.close()


def _shift(rows: list[RequestRow], by_s: float) -> None:
    """Put rows on the clock of another run."""
    for row in rows:
        row.intended_s += by_s
        row.sent_s += by_s
        row.first_s = None if row.first_s is None else row.first_s + by_s
        row.last_s = None if row.last_s is None else row.last_s + by_s
        row.end_s = None if row.end_s is None else row.end_s + by_s


async def run_load(
    load: Load,
    *,
    processes: int = 1,
    show: Show = lambda _: None,
    stop: asyncio.Event | None = None,
) -> RunResult:
    """Run a load to its end, or until `stop` is set, and return what was measured.

    `show` is called a few times a second. What fails is a row with its ending, not an exception.
    """
    if not 1 <= processes <= PROCESSES_MAX:
        raise ValueError(f"client processes must be 1 to {PROCESSES_MAX}, not {processes}")
    if processes > 1:
        from loadtest.crew import Crew

        async with Crew(load, processes) as crew:
            return await _watched(crew, crew.run(), show, stop)
    session = Session(load)
    try:
        return await _watched(session, _warm_and_run(session), show, stop)
    finally:
        session.close()


async def _warm_and_run(session: Session) -> RunResult:
    await session.warm()
    return await session.run()


async def _watched(
    running: Running,
    work: Coroutine[Any, Any, RunResult],
    show: Show,
    stop: asyncio.Event | None,
) -> RunResult:
    task = asyncio.create_task(work)
    stopping = None if stop is None else asyncio.create_task(stop.wait())
    try:
        while not task.done():
            waited = {task} if stopping is None else {task, stopping}
            await asyncio.wait(waited, timeout=SHOW_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if stopping is not None and stopping.done():
                running.stop()
                stopping = None
            show(running.progress())
        return task.result()
    finally:
        for left in (task, stopping):
            if left is not None:
                left.cancel()


def run_blocking(load: Load, *, processes: int = 1, show: Show = lambda _: None) -> RunResult:
    """Run a load from a program's main thread. Ctrl-C or SIGTERM ends it and keeps what it has.

    A second Ctrl-C is a KeyboardInterrupt.
    """
    import uvloop

    async def until_stopped() -> RunResult:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end(number: signal.Signals) -> None:
            loop.remove_signal_handler(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        return await run_load(load, processes=processes, show=show, stop=stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(until_stopped())
