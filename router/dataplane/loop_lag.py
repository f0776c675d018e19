"""How late the event loop is: what a blocking call or a starved process looks like from inside."""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.25


class LoopLag:
    """Asks for a call at regular times, and reports by how many seconds each one comes too late."""

    def __init__(self, observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
        self._observe = observe
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval_s
        self._timer = loop.call_at(due, self._tick, loop, due)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._observe(max(0.0, now - due))
        due = now + self._interval_s
        self._timer = loop.call_at(due, self._tick, loop, due)
