"""The load: closed-loop bursts, a ramp of workers, and greedy prompts whose ids are compared."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.gpu.arms import Site

REQUEST_TIMEOUT_S = 180


class OutputError(Exception):
    """A request did not get exactly its tokens."""


@dataclass(slots=True)
class Burst:
    """What a closed loop did: tokens, wall seconds, and what the server says of acceptance."""

    wall_s: float
    tokens: int
    requests: int
    accept_lengths: list[float] = field(default_factory=list)


def prompts(site: Site, count: int, seed: str, tokens: int | None = None) -> list[list[int]]:
    """Random prompts; the same seed gives every arm the same ones."""
    draw = random.Random(seed)
    length = tokens or site.prompt_tokens
    ids = site.token_ids
    return [[draw.randrange(ids.start, ids.stop) for _ in range(length)] for _ in range(count)]


async def _generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int
) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    async with session.post(f"{url}/generate", json=body) as reply:
        if reply.status != 200:
            raise OutputError(f"status {reply.status}: {(await reply.text())[:300]}")
        answer = await reply.json()
    if len(answer["output_ids"]) != tokens or answer["meta_info"]["completion_tokens"] != tokens:
        raise OutputError(
            f"{len(answer['output_ids'])} ids, {answer['meta_info']['completion_tokens']} counted, "
            f"{tokens} asked"
        )
    return answer


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


async def _burst(url: str, work: list[list[int]], concurrency: int, tokens: int) -> Burst:
    waiting = iter(work)
    accept_lengths = []

    async def worker(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            answer = await _generate(session, url, prompt, tokens)
            accepted = answer["meta_info"].get("spec_accept_length")
            if accepted:
                accept_lengths.append(accepted)

    async with _session() as session:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker(session))
        wall_s = time.perf_counter() - start
    return Burst(wall_s, len(work) * tokens, len(work), accept_lengths)


def burst(url: str, work: list[list[int]], concurrency: int, tokens: int) -> Burst:
    """Send the prompts with this many workers; every reply must hold exactly `tokens` ids."""
    return asyncio.run(_burst(url, work, concurrency, tokens))


def greedy_ids(url: str, work: list[list[int]], tokens: int) -> list[list[int]]:
    """Each prompt alone, one after the other."""

    async def ask() -> list[list[int]]:
        async with _session() as session:
            return [
                (await _generate(session, url, prompt, tokens))["output_ids"] for prompt in work
            ]

    return asyncio.run(ask())


@dataclass(slots=True)
class Ramp:
    """A ramp's outcome; `modes` are (seconds, mode, running) as seen while it ran."""

    requests: int
    tokens: int
    wall_s: float
    modes: list[tuple[float, str | None, int | None]]


async def _ramp(
    url: str,
    site: Site,
    phase_s: float,
    tokens: int,
    look: Callable[[], tuple[str | None, int | None]],
) -> Ramp:
    loop = asyncio.get_running_loop()
    start = loop.time()
    ends = [start + phase_s * (index + 1) for index in range(len(site.ramp))]
    finished = 0
    modes: list[tuple[float, str | None, int | None]] = []

    def allowed() -> int:
        now = loop.time()
        return next((load for load, end in zip(site.ramp, ends, strict=True) if now < end), 0)

    async def worker(session: aiohttp.ClientSession, index: int) -> None:
        nonlocal finished
        draw = random.Random(index)
        ids = site.token_ids
        while loop.time() < ends[-1]:
            if index >= allowed():
                await asyncio.sleep(0.05)
                continue
            length = draw.randrange(8, site.prompt_tokens)
            prompt = [draw.randrange(ids.start, ids.stop) for _ in range(length)]
            await _generate(session, url, prompt, tokens)
            finished += 1

    async def watch() -> None:
        while loop.time() < ends[-1]:
            mode, running = await asyncio.to_thread(look)
            modes.append((round(loop.time() - start, 2), mode, running))
            await asyncio.sleep(0.1)

    async with _session() as session, asyncio.TaskGroup() as group:
        for index in range(max(site.ramp)):
            group.create_task(worker(session, index))
        group.create_task(watch())
    return Ramp(finished, finished * tokens, loop.time() - start, modes)


def ramp(
    url: str,
    site: Site,
    phase_s: float,
    tokens: int,
    look: Callable[[], tuple[str | None, int | None]],
) -> Ramp:
    """Low, high and low load, `phase_s` each; `look` tells the mode and the running requests."""
    return asyncio.run(_ramp(url, site, phase_s, tokens, look))
