"""Lean HTTP/1.1 for a load client: one request at a time on each pooled connection.

No task, future, timer or copy per chunk: a read goes to the parser, the parser's body to the sink.
A request that fails is never sent again: the client measures, it does not repair.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from loadtest.record import Ending

# Servers close idle connections after some seconds (uvicorn: 5). One that has idled for longer than
# this is closed rather than used, or the server's close could meet a request on its way.
IDLE_MAX_S = 2.0


class Sink(Protocol):
    """Takes one answer. Exactly one of `ended` and `failed` is called, last."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take status and headers; names are in lower case."""
        ...

    def data(self, chunk: bytes, now: float) -> None:
        """Take a piece of the body and the time of its arrival."""
        ...

    def ended(self) -> None:
        """Take the end of a complete answer."""
        ...

    def failed(self, ending: Ending, message: str) -> None:
        """Take the end of an incomplete answer."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and the part of their head that stays the same."""

    host: str
    port: int
    tls: bool
    head: bytes

    @classmethod
    def parse(cls, url: str, path: str, api_key: str | None = None) -> "Target":
        """Split a base URL; ValueError with a message for the user if it is not http(s)://host[:port]."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"{url!r}: the port must be 1 to 65535") from None
        if parts.username is not None:
            raise ValueError("a URL with a user name is not taken: keys have a flag of their own")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:30000")
        tls = parts.scheme == "https"
        lines = [
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "User-Agent: crossover-loadtest",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        return cls(parts.hostname, port or (443 if tls else 80), tls, "\r\n".join(lines).encode())

    def request(self, body: bytes) -> bytes:
        """Return the whole request as sent."""
        return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self.head, len(body), body)


class Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._now = 0.0
        self.idle_since = 0.0

    @property
    def closed(self) -> bool:
        """Whether no request can be sent on it."""
        return self._transport is None or self._transport.is_closing()

    def start(self, request: bytes, sink: Sink) -> None:
        """Send a request; its answer goes to `sink`."""
        assert self._transport is not None
        self._sink = sink
        self._headers = []
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once; the sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse; a broken answer fails the request and closes the connection."""
        self._now = time.monotonic()  # uvloop's own time comes in whole milliseconds
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Ending.PROTOCOL, str(error) or "the answer is not HTTP/1.1")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight, if any."""
        self._pool.forget(self)
        self._fail(Ending.RESET, str(exc) if exc else "the server closed the connection")

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Hand the head on."""
        if self._sink is not None:
            self._sink.head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body on."""
        if self._sink is not None:
            self._sink.data(body, self._now)

    def on_message_complete(self) -> None:
        """Give the connection back, then end the request, which may start the next one on it."""
        sink, self._sink = self._sink, None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.close()
        if sink is not None:
            sink.ended()

    def _fail(self, ending: Ending, message: str) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.failed(ending, message)


class Pool:
    """Connections to one target; as many as there are requests at once."""

    def __init__(self, target: Target, connect_timeout_s: float = 10.0) -> None:
        self._target = target
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []

    def take(self, now: float) -> Connection | None:
        """Return an idle connection that is fresh enough."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < IDLE_MAX_S:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """Open a connection; OSError or TimeoutError if the target does not take it."""
        target = self._target
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                self._make, target.host, target.port, ssl=True if target.tls else None
            )
        return connection

    def _make(self) -> Connection:
        return Connection(self)

    def give_back(self, connection: Connection) -> None:
        """Keep an idle connection for the next request."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that was closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
