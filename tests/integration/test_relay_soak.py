"""Ten thousand clients that leave at random: at the end all is back to where it was."""

import asyncio
import gc
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from tests.integration.rig import CHAT, DONE, Call, Rig, event, request, running, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

CLIENTS = 10_000
WARM_UP = 500
AT_ONCE = 64
GROWTH_BYTES_MAX = 2 * 2**20

STREAM = request("POST", CHAT, json.dumps({"messages": [], "stream": True}).encode())
PLAIN = request("POST", CHAT, json.dumps({"messages": []}).encode())


def open_files() -> int:
    """Open file descriptors, 0 where the system does not tell."""
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except FileNotFoundError:
        return 0


class Whims:
    """An engine that does any of the things that engines do, seeded."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def __call__(self, call: Call) -> None:
        whim = self._rng.random()
        if whim < 0.3:
            await call.stream(event("a"), event("b"), DONE)
        elif whim < 0.5:
            await call.reply(b"{}")
        elif whim < 0.7:
            await call.gone()
        elif whim < 0.8:
            await call.stream_head()
            await call.gone()
        elif whim < 0.95:
            await call.stream_head()
            await call.chunk(event("a"))
            await call.gone()
        else:
            await call.stream_head()
            await call.chunk(event("a"))
            call.reset()


async def visit(rig: Rig, rng: random.Random) -> None:
    """Connect, ask, and leave at some moment, with or without manners."""
    reader, writer = await rig.raw(rng.choice((STREAM, PLAIN)))
    patience = rng.choice((0, 1, 3, 10, 40))
    try:
        for _ in range(patience):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            try:
                await asyncio.wait_for(reader.read(64), 0.02)
            except (TimeoutError, ConnectionError):
                pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def visits(rig: Rig, count: int, rng: random.Random) -> None:
    left = iter(range(count))

    async def visitor() -> None:
        for _ in left:
            await visit(rig, rng)

    await asyncio.gather(*(visitor() for _ in range(AT_ONCE)))


async def at_rest(rig: Rig) -> tuple[int, int]:
    """Wait until nothing is under way; return open files and traced bytes."""
    await until(lambda: not rig.busy, 60)
    await rig.settled()
    await until(lambda: rig.relay.attempts.aborter.pending == 0)
    for pool in rig.pools.values():
        await until(lambda pool=pool: pool.open_connections == 0)  # type: ignore[misc]
    for engine in rig.engines.values():
        await until(lambda engine=engine: engine.open_connections == 0)  # type: ignore[misc]
        engine.calls.clear()
        engine.aborts.clear()
    rig.observer.gaps.clear()
    rig.observer.records.clear()
    gc.collect()
    return open_files(), tracemalloc.get_traced_memory()[0]


async def test_ten_thousand_random_disconnects_leave_nothing_behind() -> None:
    rng = random.Random(7)
    async with running(policy="least-inflight", keepalive_s=0.5) as rig:
        # Engines that reset connections are not to be left out: health is not what is tested.
        for health in rig.health.values():
            health.transport_errors_max = 10**9
        for engine in rig.engines.values():
            engine.script = Whims(rng)
        tracemalloc.start()
        await visits(rig, WARM_UP, rng)
        files, memory = await at_rest(rig)
        await visits(rig, CLIENTS, rng)
        _, memory_after = await at_rest(rig)
        tracemalloc.stop()
        assert {"ok", "client_disconnect"} <= set(rig.observer.outcomes)
        assert rig.relay.attempts.aborter.sent > CLIENTS // 10
        assert rig.relay.attempts.aborter.dropped == 0
        # What neither side counts any more may be in the midst of being closed.
        await until(lambda: open_files() <= files)
        assert memory_after - memory < GROWTH_BYTES_MAX


async def test_a_request_leaves_no_cyclic_garbage() -> None:
    async def script(call: Call) -> None:
        if b'"stream"' in call.body:
            await call.stream(event("a"), DONE)
        else:
            await call.reply(b"{}")

    def relays_own(found: list[object]) -> list[str]:
        names = [f"{type(each).__module__}.{type(each).__qualname__}" for each in found]
        return [name for name in names if name.startswith(("router.", "httptools."))]

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.raw(b"")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(20):
                writer.write(STREAM if number % 2 else PLAIN)
                await reader.readuntil(b"0\r\n\r\n" if number % 2 else b"{}")
            gc.collect()
            assert relays_own(gc.garbage) == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        writer.close()
