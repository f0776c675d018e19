"""HTTP/1.1 for the simulated engine: one write per event, no task per request.

Requests on a connection are answered one after the other; what a client sends ahead is kept back, a
few at most.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import orjson

BODY_MAX_BYTES = 64 * 2**20
PIPELINED_MAX = 16
WRITE_BUFFER_MAX_BYTES = 64 * 1024


@dataclass(slots=True)
class Request:
    """One request, whole."""

    method: str
    path: str
    query: bytes
    content_type: str
    body: bytes
    keep_alive: bool


class Handler(Protocol):
    """What answers requests."""

    def handle(self, request: Request, exchange: "Exchange") -> None:
        """Start the answer; it may come later."""
        ...


class Exchange:
    """One request's answer. Everything written after the client has gone is dropped."""

    __slots__ = ("_connection", "_keep_alive", "done", "on_close", "on_resume")

    def __init__(self, connection: "Connection", keep_alive: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self.done = False
        self.on_close: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        """Whether the client reads what has been written."""
        return not self._connection.paused

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in a later turn of the loop, unless the exchange is over by then."""
        self._connection.loop.call_soon(lambda: None if self.done else callback())

    def open_stream(self) -> None:
        """Write the head of an event stream."""
        kind = b"content-type: text/event-stream; charset=utf-8"
        self._write(self._head(200, kind, b"transfer-encoding: chunked"))

    def event(self, data: bytes) -> None:
        """Write one event as one chunk."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def close_stream(self) -> None:
        """Write the last chunk."""
        self._write(b"0\r\n\r\n")
        self._end()

    def json(self, status: int, body: bytes) -> None:
        """Write a JSON response."""
        self.whole(status, body, b"application/json")

    def empty(self, status: int) -> None:
        """Write a response without a body."""
        self._write(self._head(status, b"content-length: 0"))
        self._end()

    def whole(self, status: int, body: bytes, content_type: bytes, *headers: bytes) -> None:
        """Write a response whose length is known."""
        length = b"content-length: %d" % len(body)
        self._write(self._head(status, length, b"content-type: " + content_type, *headers) + body)
        self._end()

    def abandon(self) -> None:
        """Take note that the client has gone."""
        on_close = self.on_close
        self._let_go()
        if on_close is not None:
            on_close()

    def _head(self, status: int, *headers: bytes) -> bytes:
        lines = [
            b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()),
            b"date: " + formatdate(usegmt=True).encode(),
            b"server: uvicorn",
            *headers,
        ]
        if not self._keep_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _write(self, data: bytes) -> None:
        if not self.done:
            self._connection.transport.write(data)

    def _end(self) -> None:
        if not self.done:
            self._let_go()
            self._connection.ended(self._keep_alive)

    def _let_go(self) -> None:
        self.done = True
        self.on_close = self.on_resume = None


class Connection(asyncio.Protocol):
    """One client connection."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler, connections: set["Connection"]) -> None:
        self.loop = asyncio.get_running_loop()
        self.paused = False
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._ahead: deque[Request] = deque()
        self._url = b""
        self._content_type = ""
        self._body: list[bytes] = []
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        # uvloop's transports are none of asyncio's classes.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(WRITE_BUFFER_MAX_BYTES)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, D102
        self._connections.discard(self)
        self._ahead.clear()
        if self._exchange is not None:
            self._exchange.abandon()

    def pause_writing(self) -> None:  # noqa: D102
        self.paused = True

    def resume_writing(self) -> None:  # noqa: D102
        self.paused = False
        exchange = self._exchange
        if exchange is not None and not exchange.done and exchange.on_resume is not None:
            exchange.on_resume()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "Unsupported upgrade request.")
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")

    def on_url(self, url: bytes) -> None:  # noqa: D102
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:  # noqa: D102
        self._body_bytes += len(body)
        if self._body_bytes > BODY_MAX_BYTES:
            self._refuse(413, "Request body too large.")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:  # noqa: D102
        url = httptools.parse_url(self._url)
        request = Request(
            method=self._parser.get_method().decode(),
            path=url.path.decode("latin-1"),
            query=url.query or b"",
            content_type=self._content_type,
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._url, self._content_type, self._body, self._body_bytes = b"", "", [], 0
        if self._exchange is None:
            self._serve(request)
            return
        self._ahead.append(request)
        if len(self._ahead) >= PIPELINED_MAX:
            self.transport.pause_reading()

    def ended(self, keep_alive: bool) -> None:
        """Go on to the next request, or close, once an exchange is over."""
        self._exchange = None
        if not keep_alive:
            self.transport.close()
        elif self._ahead:
            self.transport.resume_reading()
            self._serve(self._ahead.popleft())

    def _serve(self, request: Request) -> None:
        self._exchange = Exchange(self, request.keep_alive)
        self._handler.handle(request, self._exchange)

    def _refuse(self, status: int, message: str) -> None:
        if not self.transport.is_closing():
            Exchange(self, keep_alive=False).whole(
                status, message.encode(), b"text/plain; charset=utf-8"
            )


def encode(value: object) -> bytes:
    """Return a value as JSON."""
    return orjson.dumps(value)
