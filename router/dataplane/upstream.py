"""Connections to an engine, HTTP/1.1 on `asyncio.Protocol` and httptools, and a pool per server.

A connection hands what it reads to a sink, by plain calls from the read callback: no task, future
or timer per chunk. The pool is last in, first out, so that the surplus of a burst ages and is
closed; idle connections expire before the server's keep-alive does (uvicorn and SGLang: 5 s). It
limits idle connections only. It never limits traffic.

A request that was sent on a reused connection which then dies without a byte in answer may or may
not have been processed: the server closing an idle connection and the server dying in prefill look
the same. So such a request is sent again only if it is a GET or HEAD (attempt.py). The early expiry
keeps the race with the server's keep-alive away.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from router.dataplane.asgi import Headers
from router.dataplane.headers import NO_BODY
from router.tls import ClientTls

logger = logging.getLogger(__name__)

# Of what is no body: heads, trailers, chunk extensions. And one read more, at most.
HEAD_BYTES_MAX = 64 * 1024
IDLE_CONNECTIONS_MAX = 512
_EXHAUSTED = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
)
_STATUSES = range(100, 600)


class UpstreamError(Exception):
    """An engine could not be reached, or broke an exchange."""


class ConnectError(UpstreamError):
    """No connection: nothing was sent."""


class ExhaustedError(ConnectError):
    """This machine is out of files, ports or memory. No fault of the server's."""


class ConnectionBroken(UpstreamError):  # noqa: N818
    """The connection closed before the answer was complete."""


class BodyTruncated(UpstreamError):  # noqa: N818
    """The connection closed before the declared end of the body."""


class BadResponse(UpstreamError):  # noqa: N818
    """What came is no HTTP that can be relayed."""


class Sink(Protocol):
    """Takes one response.

    Exactly one of `on_end` and `on_fail` is called, last, unless the connection is aborted.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """Take status and headers, names in lower case."""
        ...

    def on_body(self, data: bytes) -> None:
        """Take the next bytes of the body. Called per chunk."""
        ...

    def on_end(self) -> None:
        """Take the end of a complete response."""
        ...

    def on_fail(self, error: UpstreamError) -> None:
        """Take the end of one that broke."""
        ...


class Connection(asyncio.Protocol):
    """One connection to an engine: idle in its pool, or in one exchange."""

    __slots__ = (
        "_declared", "_head_bytes", "_head_request", "_headers", "_informational", "_parser",
        "_paused", "_pool", "_sent_blindly", "_sink", "_status", "_transport", "_until_close",
        "idle_since", "reused",
    )  # fmt: skip

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._sink: Sink | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._status = 0
        self._head_bytes = 0
        self._head_request = False
        self._informational = False
        self._until_close = False
        self._declared = False
        self._paused = False
        self._sent_blindly = False
        self.reused = False
        self.idle_since = 0.0

    # The exchange's side.

    def start(self, sink: Sink, head: bytes, body: bytes, *, head_request: bool = False) -> None:
        """Send a request; the sink gets the response."""
        assert self._sink is None
        assert self._transport is not None
        self._sink = sink
        self._head_request = head_request
        self._status = self._head_bytes = 0
        self._until_close = self._declared = False
        # TLS does not tell how much of a body is still in the buffer of the socket below it.
        self._sent_blindly = self._pool.encrypted and len(body) > HEAD_BYTES_MAX
        if len(body) <= HEAD_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    @property
    def answered(self) -> bool:
        """Whether a byte has come in answer to the request."""
        return self._head_bytes > 0

    @property
    def usable(self) -> bool:
        """Whether a request can still be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def pause(self) -> None:
        """Stop reading: what is being read now is still delivered, nothing after it."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once. The sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, and set its socket up."""
        # A cast: uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._pool.open_connections += 1
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Parse what was read. Called per chunk."""
        if self._sink is None:
            self.abort()  # not asked for
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadResponse("the server wants another protocol"))
        except httptools.HttpParserCallbackError as error:
            logger.error("the answer of a server could not be taken", exc_info=error)  # noqa: TRY400
            self._fail(BadResponse("a fault of the router's own"))
        except httptools.HttpParserError as error:
            self._fail(BadResponse(str(error) or type(error).__name__))
        else:
            if self._head_bytes > HEAD_BYTES_MAX and self._sink is not None:
                self._fail(BadResponse("what is no body of the response is too long"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: well, if the body was to end like this."""
        self._pool.open_connections -= 1
        self._transport = None
        if self._until_close and exc is None and self._sink is not None:
            self._complete()
        elif self._declared:
            self._fail(BodyTruncated("the connection closed before the end of the body"))
        else:
            self._fail(ConnectionBroken(str(exc) if exc else "the server closed the connection"))

    # httptools

    def on_message_begin(self) -> None:
        """Make ready for a head."""
        self._headers = []
        self._informational = False
        if self._sink is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers, which come after the body, are dropped."""
        if self._status == 0:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Hand the head over, and see how the body will end."""
        sink = self._sink
        if sink is None:
            return
        status = self._parser.get_status_code()
        if status not in _STATUSES:
            self._fail(BadResponse(f"{status} is no status"))
            return
        if status < 200:
            self._informational = True
            return
        self._status = status
        if not self._head_request and status not in NO_BODY:
            names = {name for name, _ in self._headers}
            self._declared = b"content-length" in names
            self._until_close = not self._declared and b"transfer-encoding" not in names
        sink.on_head(status, self._headers)
        if self._head_request:
            # The parser waits for a body that does not come, and cannot be told: used no more.
            self._complete()
            self._close()

    def on_body(self, data: bytes) -> None:
        """Hand bytes of the body over. Called per chunk."""
        self._head_bytes = 1
        sink = self._sink
        if sink is not None:
            sink.on_body(data)

    def on_message_complete(self) -> None:
        """End the exchange; the connection goes back to its pool if it may be used again."""
        if self._informational or self._sink is None:
            return
        keep = self._parser.should_keep_alive()
        self._complete()
        unread = self._sent_blindly and self._status >= 400
        if self._transport is not None and (unread or self._transport.get_write_buffer_size()):
            self.abort()  # answered unread: nothing that is sent behind the rest need ever be read
        elif keep and self.usable:
            self.resume()
            self._pool.put(self)
        else:
            self._close()

    def _complete(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end()

    def _fail(self, error: UpstreamError) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_fail(error)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Pool:
    """The connections to one server. `keepalive_s` is how long an idle one may be used again.

    `tls` is for an https URL; without it, the system's certificate authorities are asked.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        keepalive_s: float,
        clock: Callable[[], float],
        idle_max: int = IDLE_CONNECTIONS_MAX,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an http URL: {url!r}")
        self.host = parts.netloc.rpartition("@")[2].encode("ascii")
        self.base_path = parts.path.rstrip("/").encode("ascii")
        self.open_connections = 0
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._tls = (tls or ClientTls().context()) if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._clock = clock
        self._idle: deque[Connection] = deque()
        self._idle_max = idle_max
        self._closed = False

    @property
    def encrypted(self) -> bool:
        """Whether it speaks TLS."""
        return self._tls is not None

    @property
    def idle_connections(self) -> int:
        """Connections kept for the next request, dead ones not yet swept included."""
        return len(self._idle)

    async def connection(self) -> Connection:
        """Return a connection, the youngest idle one if there is any.

        ConnectError if there is none to be had.
        """
        return self.take() or await self.connect()

    def take(self) -> Connection | None:
        """Return the youngest idle connection, None if there is none."""
        oldest = self._clock() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """Return a new connection. ConnectError if there is none to be had."""
        host, port = self._address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), host, port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise ExhaustedError(error.strerror) from error
            raise ConnectError(error.strerror or str(error) or type(error).__name__) from error
        return connection

    def configure(self, connect_timeout_s: float, keepalive_s: float) -> None:
        """Change the times; they hold from the next connection, and the next look at idle ones."""
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s

    def put(self, connection: Connection) -> None:
        """Take back a connection whose exchange is over."""
        if self._closed or len(self._idle) >= self._idle_max:
            connection.abort()
            return
        connection.idle_since = self._clock()
        connection.reused = True
        self._idle.append(connection)

    def sweep(self, now: float) -> None:
        """Close what has been idle too long, and forget what the server closed.

        Called about once a second.
        """
        keep = [c for c in self._idle if c.usable and now - c.idle_since < self._keepalive_s]
        for connection in self._idle:
            if connection.usable and now - connection.idle_since >= self._keepalive_s:
                connection.abort()
        self._idle = deque(keep)

    def close(self) -> None:
        """Close the idle connections and keep no more. Exchanges under way go on."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()
