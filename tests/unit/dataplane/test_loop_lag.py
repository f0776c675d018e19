"""The event loop's lag, seen from inside."""

import asyncio

import pytest

from router.dataplane.loop_lag import LoopLag

pytestmark = pytest.mark.anyio


async def test_a_late_loop_is_reported_until_the_watch_is_stopped() -> None:
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    third = asyncio.Event()

    def observe(lag_s: float) -> None:
        lags.append(lag_s)
        if len(lags) == 3:
            third.set()

    lag = LoopLag(observe, interval_s=0.001)
    lag.start()
    held_until = loop.time() + 0.05
    while loop.time() < held_until:
        pass
    async with asyncio.timeout(10):
        await third.wait()
    lag.stop()
    assert lags[0] >= 0.04
    stopped = asyncio.Event()
    loop.call_later(0.02, stopped.set)
    await stopped.wait()
    assert len(lags) == 3
