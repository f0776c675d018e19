"""The way to the client: ASGI's `send`, stepped in place.

An ASGI server's `send` waits only if the client reads more slowly than we write. So it is run right
from the callback that has the bytes, without a task; only if it waits is it handed, half run, to a
task that sees it through, and reading from the engine is paused meanwhile. What is still to be sent
is then at most what had been read. That uses nothing but the ASGI and coroutine protocols, so it
holds for any server.

On uvicorn a chunk that can be written at once is written, framed, past `send`: a tenth of what a
chunk costs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol

from router.dataplane.asgi import Headers, Message, Send
from router.dataplane.inlet import cycle_of, takes_chunks


class Source(Protocol):
    """What can be told to stop producing."""

    def pause(self) -> None:
        """Stop."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def send_failed(self, error: Exception) -> None:
        """Take note that the server refused a message: nothing more can be sent."""
        ...


class Outlet:
    """Sends one response, and holds back its source when that is too fast.

    Its methods never raise.
    """

    __slots__ = (
        "_backlog",
        "_chunk",
        "_clock",
        "_cycle",
        "_send",
        "_source",
        "_task",
        "stalled_at",
        "started",
    )

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._cycle = cycle_of(send)
        self._clock = clock
        self._backlog: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None
        self._chunk: Message = {"type": "http.response.body", "body": b"", "more_body": True}
        self._source: Source | None = None
        self.stalled_at: float | None = None
        self.started = False

    def attach(self, source: Source | None) -> None:
        """Name who is to be held back; None when its part is over."""
        self._source = source

    def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        self._push({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        """Send bytes of the body.

        Called per chunk; the message is reused, for `send` is done with it or waits.
        """
        if self._task is not None:
            self._backlog.append({"type": "http.response.body", "body": data, "more_body": True})
            return
        cycle = self._cycle
        if cycle is not None and data and takes_chunks(cycle):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        chunk = self._chunk
        chunk["body"] = data
        self._push(chunk)

    def end(self) -> None:
        """Send the end of the body."""
        self._push({"type": "http.response.body", "body": b"", "more_body": False})

    async def flush(self) -> None:
        """Wait until all is handed to the server."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def discard(self) -> None:
        """Drop what is not sent yet."""
        self._backlog.clear()
        if self._task is not None:
            self._task.cancel()

    def _fail(self, error: Exception) -> None:
        self._backlog.clear()
        if self._source is not None:
            self._source.send_failed(error)

    def _push(self, message: Message) -> None:
        if self._task is not None:
            self._backlog.append(message)
            return
        send = self._send
        sending = send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  (whatever the server raises ends the response)
            self._fail(error)
            return
        if message is self._chunk:
            self._chunk = dict(message)
        self.stalled_at = self._clock()
        if self._source is not None:
            self._source.pause()
        self._task = asyncio.get_running_loop().create_task(
            self._drain(_Resumed(sending, waits_for))
        )

    async def _drain(self, started: "_Resumed") -> None:
        try:
            await started
            while self._backlog:
                await self._send(self._backlog.popleft())
        except Exception as error:  # noqa: BLE001  (whatever the server raises ends the response)
            self._fail(error)
        finally:
            self._task = None
            self.stalled_at = None
            if self._source is not None:
                self._source.resume()


class _Resumed:
    """A coroutine that was already run up to its first wait."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001  (cancellation is passed on like the rest)
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, value)
            try:
                waits_for = step()
            except StopIteration:
                return
