"""The demo's processes: one that hosts both simulated engines, and a router in front of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from loadtest.children import Child, ChildError, free_port
from loadtest.scenarios import Scenario
from router.core.types import Layout, Role

START_S = 30.0
IDLE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Router:
    """A router that is ready."""

    url: str
    process: Child


class Rig:
    """Both engines, from `async with` to its end; routers are started one after the other."""

    def __init__(self, scenario: Scenario, layout: Layout, out: Path, seed: int) -> None:
        self._layout = layout
        self._out = out
        self._stack = AsyncExitStack()
        self._ports = {Role.SPEC: free_port(), Role.BASE: free_port()}
        models = {Role.SPEC: scenario.spec, Role.BASE: scenario.base}
        self.engines = Child(
            "simulated engines",
            [
                *("-m", "loadtest", "engine"),
                *(f"{role}={models[role]}:{port}" for role, port in self._ports.items()),
                *("--layout", layout, "--clock", f"{scenario.clock:g}", "--seed", f"{seed}"),
            ],
            out / "engines.log",
        )
        self._http = httpx.AsyncClient(timeout=5.0, trust_env=False)

    async def __aenter__(self) -> Self:
        """Start the engines and wait until both answer."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._http)
            await stack.enter_async_context(self.engines)
            for role in self._ports:
                await self._until_ok(self._url(role) + "/health", self.engines)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the engines."""
        await self._stack.aclose()

    @asynccontextmanager
    async def router(self, name: str, policy: str, threshold: int) -> AsyncIterator[Router]:
        """Run a router of this policy, ready when the block begins."""
        port = free_port()
        arguments = [
            *("-m", "router", "serve", "--host", "127.0.0.1", "--port", f"{port}"),
            *("--drain-timeout-s", "0"),  # who ends a demo does not wait for its requests
            *("--spec-url", self._url(Role.SPEC), "--base-url", self._url(Role.BASE)),
            *("--layout", self._layout, "--policy", policy, "--threshold", f"{threshold}"),
        ]
        async with Child("router", arguments, self._out / f"router-{name}.log") as process:
            url = f"http://127.0.0.1:{port}"
            await self._until_ok(url + "/readyz", process)
            yield Router(url, process)

    async def idle(self) -> None:
        """Wait until the engines have nothing left to do; ChildError if they go on for long."""

        async def busy() -> bool:
            loads = [await self._json(role, "/v1/loads") for role in self._ports]
            return any(load["aggregate"]["total_reqs"] for load in loads)

        await _until_not(busy, IDLE_S, "the engines still work though every client has left")

    async def slipped_s(self) -> float:
        """Return by how much the slower engine has fallen behind its model's clock."""
        infos = [await self._json(role, "/server_info") for role in self._ports]
        return float(max(info["simulation"]["slipped_s"] for info in infos))

    def _url(self, role: Role) -> str:
        return f"http://127.0.0.1:{self._ports[role]}"

    async def _json(self, role: Role, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = (await self._http.get(self._url(role) + path)).json()
        except httpx.HTTPError as error:
            self.engines.check()
            raise ChildError(f"the {role} engine does not answer: {error!r}") from None
        return found

    async def _until_ok(self, url: str, child: Child) -> None:
        async def not_ok() -> bool:
            child.check()
            try:
                return (await self._http.get(url)).status_code != 200
            except httpx.TransportError:
                return True

        message = f"the {child.name} is not ready after {START_S:g} s"
        try:
            await _until_not(not_ok, START_S, message)
        except ChildError as error:
            raise ChildError(f"{error}\n{child.last_words()}") from None


async def _until_not(
    holds: Callable[[], Coroutine[Any, Any, bool]], limit_s: float, message: str
) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while await holds():  # noqa: ASYNC110 - processes notify nobody
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ChildError(message) from None
