"""Asking every server something again and again: one task each, one question at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from router.core.types import ServerSpec
from router.dataplane.engine_api import EngineApi

Ask = Callable[[ServerSpec, EngineApi], Awaitable[None]]


class Watch:
    """Calls `ask` for each server until it is closed; `pause_s` tells how long after each call.

    What `ask` does not expect is logged under `what` and ends nothing: a server that is not
    watched never comes back.
    """

    def __init__(
        self,
        what: str,
        servers: Sequence[ServerSpec],
        ask: Ask,
        pause_s: Callable[[ServerSpec], float],
        log: logging.Logger,
    ) -> None:
        self._what = what
        self._servers = servers
        self._ask = ask
        self._pause_s = pause_s
        self._log = log
        self._api: EngineApi | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, api: EngineApi) -> None:
        """Begin, on the running loop. The client is closed with the watch."""
        self._api = api
        self._tasks = [
            asyncio.create_task(self._follow(server, api), name=f"{self._what} {server.name}")
            for server in self._servers
        ]

    async def aclose(self) -> None:
        """End, and wait until all is closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._api is not None:
            await self._api.aclose()

    async def _follow(self, server: ServerSpec, api: EngineApi) -> None:
        while True:
            try:
                await self._ask(server, api)
            except Exception:  # noqa: BLE001  (the boundary of a task)
                self._log.exception("%s of %s failed unexpectedly", self._what, server.name)
            await asyncio.sleep(self._pause_s(server))
