"""The real command as a process, in front of simulated or scripted engines on real sockets."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from loadtest.engines import ENGINES
from loadtest.sim_server import EngineSpec, SimServer

DEADLINE_S = 30.0
POLL_S = 0.02
CHAT = {"model": "crossover-sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
MODELS = {"spec": "h200-tree-v1", "base": "h200-plain"}


@asynccontextmanager
async def engine(role: str, port: int) -> AsyncIterator[None]:
    async with SimServer([EngineSpec(role, ENGINES[MODELS[role]], port)]):
        yield


@dataclass
class Router:
    """A running `crossover serve`, and what it has written."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    url: str = ""

    def logged(self, **fields: object) -> list[dict[str, object]]:
        parsed = [json.loads(line) for line in self.lines]
        return [
            each for each in parsed if all(each.get(key) == value for key, value in fields.items())
        ]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended()


@asynccontextmanager
async def router(*arguments: str, wait: bool = True) -> AsyncIterator[Router]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CROSSOVER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "serve", "--port", "0", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ,
        start_new_session=True,
    )  # fmt: skip
    made = Router(process)
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        asyncio.create_task(_collect(process.stdout, made.lines)),
        asyncio.create_task(_collect(process.stderr, made.errors)),
    ]
    try:
        if wait:
            await until(lambda: made.process.returncode is not None or _address(made))
            made.url = _address(made) or ""
            assert made.url, made.errors
        yield made
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(*readers)


async def _collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode().rstrip("\n"))  # noqa: PERF401  (others read it meanwhile)


def _address(made: Router) -> str | None:
    for line in made.lines:
        found = re.search(r"listening on (http://\S+):", line)
        if found:
            return found[1]
    return None


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  (another process has no event)
            await asyncio.sleep(POLL_S)


async def ready(client: httpx.AsyncClient, *up: str) -> None:
    """Wait until exactly these servers are up."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            state = (await client.get("/crossover/state")).json()
            if {server["name"] for server in state["servers"] if server["up"]} == set(up):
                return
            await asyncio.sleep(POLL_S)


async def chat(client: httpx.AsyncClient, **extra: object) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **extra})


@asynccontextmanager
async def client_of(made: Router) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=made.url, timeout=DEADLINE_S, trust_env=False) as client:
        yield client
