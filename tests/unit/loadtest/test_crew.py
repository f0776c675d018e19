"""The pipes of the client processes carry results of any size."""

import asyncio
from multiprocessing import Pipe
from threading import Thread

import uvloop

from loadtest.crew import _watch

SIZE = 32 << 20


def test_a_result_larger_than_the_pipes_buffer_is_sent_whole_by_a_process_that_listens() -> None:
    ours, theirs = Pipe()
    received: list[bytes] = []
    reader = Thread(target=lambda: received.append(theirs.recv()), daemon=True)

    async def send() -> None:
        _watch(ours, lambda: None)
        reader.start()
        try:
            ours.send(b"x" * SIZE)
        finally:
            asyncio.get_running_loop().remove_reader(ours.fileno())

    with ours, theirs, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send())
        reader.join(20)
        assert [len(message) for message in received] == [SIZE]
