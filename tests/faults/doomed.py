"""An engine that is a process of its own, to be killed with no time for a last word."""

import asyncio
import os
import signal
import sys

from tests.integration.rig import Engine

# Given a listening socket by its number and what to write: reads one request, writes, and hangs.
_PROGRAM = """
import re, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as listening:
    peer, _ = listening.accept()
    wire = b""
    while b"\\r\\n\\r\\n" not in wire:
        wire += peer.recv(65536)
    head, _, body = wire.partition(b"\\r\\n\\r\\n")
    length = int(re.search(rb"content-length: (\\d+)", head)[1])
    while len(body) < length:
        body += peer.recv(65536)
    peer.sendall(bytes.fromhex(sys.argv[2]))
    print("written", flush=True)
    time.sleep(60)
"""


class Doomed(Engine):
    """Writes a beginning of an answer to one request; `kill` it after that."""

    def __init__(self, beginning: bytes) -> None:
        super().__init__()
        self._beginning = beginning
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        number = self._socket.fileno()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", _PROGRAM, str(number), self._beginning.hex(),
            pass_fds=[number], stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._socket.close()

    async def kill(self, *, once_written: bool) -> None:
        """End it as the kernel does when memory runs out."""
        assert self._process is not None
        assert self._process.stdout is not None
        if once_written:
            assert await self._process.stdout.readline() == b"written\n"
        os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
