"""A whole response at once, bounded: for the few requests whose answer the router itself reads."""

import asyncio
from dataclasses import dataclass

from router.dataplane.asgi import Headers
from router.dataplane.upstream import BadResponse, Connection, Pool, UpstreamError


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete response."""

    status: int
    headers: Headers
    body: bytes


class _Collector:
    __slots__ = ("_body", "_connection", "_head", "_limit_bytes", "done")

    def __init__(self, connection: Connection, limit_bytes: int) -> None:
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._head: tuple[int, Headers] = (0, [])
        self._body = bytearray()
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Headers) -> None:
        self._head = (status, headers)

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit_bytes:
            self._connection.abort()
            self.on_fail(BadResponse(f"the body is larger than {self._limit_bytes} bytes"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(Fetched(*self._head, bytes(self._body)))

    def on_fail(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def fetch(
    pool: Pool, head: bytes, body: bytes = b"", *, timeout_s: float, limit_bytes: int
) -> Fetched:
    """Send one request and return its response.

    UpstreamError, or TimeoutError after `timeout_s`.
    """
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.connection()
            collector = _Collector(connection, limit_bytes)
            connection.start(collector, head, body)
            return await collector.done
    except BaseException:
        if connection is not None:
            connection.abort()
        raise
