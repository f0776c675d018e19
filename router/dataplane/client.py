"""The client's side of one request: its body, and whether it is still there."""

import asyncio
from collections.abc import Callable

from router.dataplane.asgi import Receive

OnGone = Callable[[], None]


class ClientGoneError(Exception):
    """The client left before its request was complete."""


class BodyTooLargeError(Exception):
    """The request body is over the limit."""


class BodyStalledError(Exception):
    """Nothing more of the request body came for too long."""


class Client:
    """Reads the body, then watches for the client to leave: one task for the whole request."""

    __slots__ = ("_receive", "_task", "gone", "on_gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self.gone = False
        self.on_gone: OnGone | None = None

    async def body(self, limit_bytes: int, declared_bytes: int | None, idle_s: float) -> bytes:
        """Return the whole body.

        BodyTooLargeError as soon as it is known to be, ClientGoneError if it ends early,
        BodyStalledError if nothing comes for `idle_s`.
        """
        if declared_bytes is not None and declared_bytes > limit_bytes:
            raise BodyTooLargeError
        try:
            async with asyncio.timeout(idle_s) as waiting:
                return await self._body(limit_bytes, idle_s, waiting)
        except TimeoutError:
            raise BodyStalledError from None

    async def _body(self, limit_bytes: int, idle_s: float, waiting: asyncio.Timeout) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise BodyTooLargeError
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            waiting.reschedule(asyncio.get_running_loop().time() + idle_s)

    def watch(self) -> None:
        """Begin to watch.

        `on_gone` is called at most once; a server may call a finished response a disconnect.
        """
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self.on_gone = None
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()
