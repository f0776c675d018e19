"""Several client processes on one load: each has every nth request, all begin at one moment.

A client process is told its part and the moment to begin through a pipe, and sends its progress and
then its result back. It ends when the pipe does, so that none outlives the program.
"""

import asyncio
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Self

from loadtest.load import Load
from loadtest.record import Progress, RequestRow, RunResult, ServerProgress
from loadtest.runner import SHOW_EVERY_S, Session

# From the word to begin until it is heard: the begin is the same moment everywhere.
BEGIN_IN_S = 0.1
END_S = 5.0


@dataclass(frozen=True, slots=True)
class _Warm:
    """The warm-up is over."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """Begin at this moment of the monotonic clock, which all processes of a host share."""

    at: float


@dataclass(frozen=True, slots=True)
class _Stop:
    """End now and send the result."""


def _watch(pipe: Connection, heard: Callable[[], None]) -> None:
    """Call `heard` whenever a message begins to arrive.

    uvloop makes what it watches non-blocking, where a message larger than the pipe's buffer would
    fail half-way; messages are sent and received whole.
    """
    asyncio.get_running_loop().add_reader(pipe.fileno(), heard)
    os.set_blocking(pipe.fileno(), True)


class _Member:
    """One client process, seen from the program."""

    def __init__(self, load: Load) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, load))
        self._process.start()
        theirs.close()
        loop = asyncio.get_running_loop()
        self.warm: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[RunResult | None] = loop.create_future()
        self.progress: Progress | None = None
        _watch(self._pipe, self._read)

    def tell(self, message: _Begin | _Stop) -> None:
        """Send a message; nothing if the process has ended."""
        try:
            self._pipe.send(message)
        except OSError:
            pass

    def end(self) -> None:
        """End the process and free its pipe."""
        self._forget()
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _read(self) -> None:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._forget()
            return
        if isinstance(message, Progress):
            self.progress = message
        elif isinstance(message, RunResult):
            self.result.set_result(message)
        elif not self.warm.done():
            self.warm.set_result(None)

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if not self.warm.done():
            self.warm.set_result(None)
        if not self.result.done():
            self.result.set_result(None)


class Crew:
    """The client processes of one run, from `async with` to its end."""

    def __init__(self, load: Load, processes: int) -> None:
        self._parts = [load.share(index, processes) for index in range(processes)]
        self._members: list[_Member] = []

    async def __aenter__(self) -> Self:
        """Start the processes."""
        self._members = [_Member(part) for part in self._parts]
        return self

    async def __aexit__(self, *_: object) -> None:
        """End them."""
        for member in self._members:
            member.end()

    async def run(self) -> RunResult:
        """Wait for every warm-up, let all begin, and merge their results."""
        await asyncio.gather(*(member.warm for member in self._members))
        begin = _Begin(time.monotonic() + BEGIN_IN_S)
        for member in self._members:
            member.tell(begin)
        return merged(await asyncio.gather(*(member.result for member in self._members)))

    def progress(self) -> Progress:
        """Return how far all of them are."""
        return _summed([m.progress for m in self._members if m.progress is not None])

    def stop(self) -> None:
        """End the run now; what was measured is kept."""
        for member in self._members:
            member.tell(_Stop())


def merged(results: Iterable[RunResult | None]) -> RunResult:
    """Merge the results of the processes of one run; None stands for one that was lost."""
    every = list(results)
    found = [result for result in every if result is not None]
    lags = array("d")
    for result in found:
        lags += result.lags_s
    gave_up = [result.gave_up for result in found if result.gave_up is not None]
    reason: str | None
    if lost := len(every) - len(found):
        reason = f"{lost} of {len(every)} client processes ended early: their requests are lost"
    else:
        # One that gave up while others measure had bad targets only: its rows say so.
        reason = gave_up[0] if len(gave_up) == len(found) else None
    return RunResult(
        rows=_in_order(row for result in found for row in result.rows),
        duration_s=max((result.duration_s for result in found), default=0.0),
        cpu_s=sum(result.cpu_s for result in found),
        lags_s=lags,
        warmup=_in_order(row for result in found for row in result.warmup),
        processes=len(every),
        gave_up=reason,
        interrupted=any(result.interrupted for result in found),
    )


def _in_order(rows: Iterable[RequestRow]) -> list[RequestRow]:
    return sorted(rows, key=lambda row: (row.intended_s, row.index))


def _summed(parts: list[Progress]) -> Progress:
    servers: dict[str, ServerProgress] = {}
    for part in parts:
        for name, add in part.servers.items():
            has = servers.get(name, ServerProgress())
            servers[name] = ServerProgress(
                has.in_flight + add.in_flight, has.requests + add.requests, has.tokens + add.tokens
            )
    return Progress(
        elapsed_s=max((part.elapsed_s for part in parts), default=0.0),
        started=sum(part.started for part in parts),
        finished=sum(part.finished for part in parts),
        errors=sum(part.errors for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        servers=servers,
        warming=any(part.warming for part in parts),
    )


def _work(pipe: Connection, load: Load) -> None:
    """Be a client process."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's to tell
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, load))


async def _serve(pipe: Connection, load: Load) -> None:
    loop = asyncio.get_running_loop()
    session = Session(load)
    begin: asyncio.Future[float | None] = loop.create_future()

    def hear() -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = _Stop()
            loop.remove_reader(pipe.fileno())
        if isinstance(message, _Stop):
            session.stop()
        if not begin.done():
            begin.set_result(message.at if isinstance(message, _Begin) else None)

    _watch(pipe, hear)
    telling = asyncio.create_task(_tell(pipe, session))
    try:
        await session.warm()
        pipe.send(_Warm())
        result = await session.run(await begin)
        telling.cancel()
        pipe.send(result)
    except OSError:
        pass  # the program is gone
    finally:
        telling.cancel()
        loop.remove_reader(pipe.fileno())
        session.close()


async def _tell(pipe: Connection, session: Session) -> None:
    while True:
        await asyncio.sleep(SHOW_EVERY_S)
        pipe.send(session.progress())
