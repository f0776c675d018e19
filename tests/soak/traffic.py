"""Engines and clients that do anything at any moment, seeded: for the soak, and its part in CI."""

import asyncio
import contextlib
import json
import random
from collections import Counter

from tests.integration.rig import CHAT, DONE, Call, answer, event, request

AT_ONCE = 64
# How long a client that reads to the end waits for one: longer than any limit of the router's.
PATIENCE_S = 60.0

STREAM = request("POST", CHAT, json.dumps({"messages": [], "stream": True}).encode())
PLAIN = request("POST", CHAT, json.dumps({"messages": []}).encode())
_LAST_STREAM = STREAM.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
_LAST_PLAIN = PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)


class Whims:
    """An engine that does any of the things that engines do."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def __call__(self, call: Call) -> None:
        whim = self._rng.random()
        if call.method == "GET":  # probes, and what is asked of an engine beside them
            await answer(call)
        elif whim < 0.3:
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


class Faults(Whims):
    """One that mostly works, and fails in every way now and then."""

    async def __call__(self, call: Call) -> None:
        whim = self._rng.random()
        if call.method == "GET" or whim < 0.03:
            await super().__call__(call)
        elif whim < 0.05:
            call.reset()
        elif whim < 0.06:
            await call.write(b"HTTP/9.9 what\r\n\r\n")
            call.reset()
        elif whim < 0.07:
            await call.stream_head()
            await call.write(b"zz\r\n")
            call.reset()
        elif whim < 0.09:
            await call.reply(b'{"error": {"message": "full", "code": 503}}', 503)
        elif b'"stream"' in call.body:
            await call.stream_head()
            for _ in range(self._rng.randrange(1, 30)):
                await call.chunk(event("word " * self._rng.randrange(1, 400)))
                await asyncio.sleep(self._rng.random() * 0.02)
            await call.chunk(DONE)
            await call.end()
        else:
            await call.reply(b'{"text": "' + b"x" * self._rng.randrange(1, 20_000) + b'"}')


async def visit(port: int, rng: random.Random) -> None:
    """Connect, ask, and leave at some moment, with or without manners."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    patience = rng.choice((0, 1, 3, 10, 40))
    try:
        with contextlib.suppress(TimeoutError, ConnectionError):
            writer.write(rng.choice((STREAM, PLAIN)))
            await writer.drain()
            for _ in range(patience):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                await asyncio.wait_for(reader.read(64), 0.02)
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def visits(
    port: int, count: int, rng: random.Random, done: Counter[str] | None = None
) -> None:
    """Make so many visits, some at a time; `done["left"]` counts them as they end."""
    left = iter(range(count))
    done = Counter() if done is None else done

    async def visitor() -> None:
        for _ in left:
            await visit(port, rng)
            done["left"] += 1

    await asyncio.gather(*(visitor() for _ in range(AT_ONCE)))


async def ask(port: int, rng: random.Random) -> str:
    """Ask, read to the end, some slowly; return what the answer was, in a word."""
    streamed = rng.random() < 0.7
    pause_s = rng.choice((0.0, 0.0, 0.0, 0.02))
    wire = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(_LAST_STREAM if streamed else _LAST_PLAIN)
            while data := await reader.read(4096):
                wire += data
                await asyncio.sleep(pause_s)
    except ConnectionError:
        pass
    except TimeoutError:
        return "stuck"
    finally:
        writer.transport.abort()
    return judged(bytes(wire), streamed=streamed)


def judged(wire: bytes, *, streamed: bool) -> str:
    """Return a status, `broken` for a stream that says so, `wrong` for one that pretends an end."""
    status = wire[9:12].decode("latin-1") or "unanswered"
    if not streamed or status != "200" or b"chunked" not in wire.partition(b"\r\n\r\n")[0]:
        return status
    if not wire.endswith(b"\r\n0\r\n\r\n"):
        return "broken"
    return "200" if DONE in wire else "wrong"
