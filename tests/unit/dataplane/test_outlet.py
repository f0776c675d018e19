"""The stepped send, against servers that wait, refuse, and yield in odd ways."""

import asyncio
import gc
from time import monotonic
from typing import Any

import pytest

from router.dataplane.asgi import Message
from router.dataplane.outlet import Outlet

pytestmark = pytest.mark.anyio


class Server:
    """An ASGI server's send: waits while its gate is shut, refuses what it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.body: list[bytes] = []
        self.types: list[str] = []
        self.refuse: bytes | None = None
        self.rounds = 0

    async def send(self, message: Message) -> None:
        for _ in range(self.rounds):
            await asyncio.sleep(0)
        await self.gate.wait()
        if self.refuse is not None and message.get("body") == self.refuse:
            raise RuntimeError("no more")
        self.types.append(message["type"].removeprefix("http.response."))
        self.body.append(message.get("body", b""))


class Source:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def send_failed(self, error: Exception) -> None:
        self.log.append(str(error))


def pair() -> tuple[Server, Source, Outlet]:
    server, source = Server(), Source()
    outlet = Outlet(server.send, monotonic)
    outlet.attach(source)
    return server, source, outlet


async def test_a_server_that_does_not_wait_costs_no_task() -> None:
    server, source, outlet = pair()
    tasks = len(asyncio.all_tasks())
    outlet.start(200, [])
    outlet.write(b"a")
    outlet.write(b"b")
    outlet.end()
    assert server.body == [b"", b"a", b"b", b""]
    assert server.types == ["start", "body", "body", "body"]
    assert len(asyncio.all_tasks()) == tasks
    assert source.log == []


async def test_a_server_that_waits_holds_the_source_and_loses_no_order() -> None:
    server, source, outlet = pair()
    outlet.start(200, [])
    server.gate.clear()
    for text in (b"a", b"b", b"c"):
        outlet.write(text)
    outlet.end()
    assert source.log == ["pause"]
    assert outlet.stalled_at is not None
    server.gate.set()
    await outlet.flush()
    assert server.body == [b"", b"a", b"b", b"c", b""]
    assert source.log == ["pause", "resume"]
    assert outlet.stalled_at is None
    outlet.write(b"d")
    assert server.body[-1] == b"d"


async def test_any_number_of_waits_within_one_send_is_seen_through() -> None:
    server, source, outlet = pair()
    server.rounds = 3
    outlet.start(200, [])
    outlet.write(b"a")
    await outlet.flush()
    assert server.body == [b"", b"a"]
    assert source.log == ["pause", "resume"]


async def test_a_message_that_waits_is_not_overwritten_by_the_next() -> None:
    server, _, outlet = pair()
    server.gate.clear()
    outlet.write(b"first")
    server.gate.set()
    outlet.write(b"second")
    await outlet.flush()
    outlet.write(b"third")
    assert server.body == [b"first", b"second", b"third"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_refused_message_is_reported_once_and_raises_nothing(waits: bool) -> None:
    server, source, outlet = pair()
    server.refuse = b"bad"
    if waits:
        server.gate.clear()
    outlet.write(b"bad")
    outlet.write(b"after")
    server.gate.set()
    await outlet.flush()
    assert source.log.count("no more") == 1


async def test_a_discarded_response_leaves_no_task_and_no_waiter() -> None:
    server, _, outlet = pair()
    tasks = len(asyncio.all_tasks())
    server.gate.clear()
    outlet.write(b"a")
    outlet.write(b"b")
    await asyncio.sleep(0)
    outlet.discard()
    await outlet.flush()
    del outlet
    gc.collect()
    assert server.body == []
    assert len(asyncio.all_tasks()) == tasks


async def test_a_detached_source_is_not_resumed() -> None:
    server, source, outlet = pair()
    server.gate.clear()
    outlet.write(b"a")
    outlet.attach(None)
    server.gate.set()
    await outlet.flush()
    assert source.log == ["pause"]
