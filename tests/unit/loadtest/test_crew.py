"""The pipes of the client processes carry results of any size."""

import asyncio
from multiprocessing import Pipe
from threading import Thread

import uvloop

from loadtest.crew import _watch

SIZE = 8 << 20


def test_a_result_larger_than_the_pipes_buffer_arrives_whole() -> None:
    async def receive() -> bytes:
        ours, theirs = Pipe()
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        _watch(ours, lambda: heard.set_result(ours.recv()))
        sender = Thread(target=theirs.send, args=(b"x" * SIZE,))
        sender.start()
        try:
            return await asyncio.wait_for(heard, 20)
        finally:
            asyncio.get_running_loop().remove_reader(ours.fileno())
            ours.close()
            sender.join()
            theirs.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert len(runner.run(receive())) == SIZE
