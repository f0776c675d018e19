"""Ten thousand clients that leave at random: at the end all is back to where it was."""

import gc
import random
import tracemalloc
from pathlib import Path

import pytest

from tests.integration.rig import DONE, Call, Rig, event, running, until
from tests.soak.traffic import PLAIN, STREAM, Whims, visits

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

CLIENTS = 10_000
WARM_UP = 500
GROWTH_BYTES_MAX = 2 * 2**20


def open_files() -> int:
    """Open file descriptors, 0 where the system does not tell."""
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except FileNotFoundError:
        return 0


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
        await visits(rig.port, WARM_UP, rng)
        files, memory = await at_rest(rig)
        await visits(rig.port, CLIENTS, rng)
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
