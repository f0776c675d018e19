"""One request on a client's connection and the response to it: the client's side of the relay.

It takes the place that uvicorn gives to a `RequestResponseCycle`, and needs no ASGI and no task:
what a call has to send is framed and written from the callback that has it. A client that reads
slowly is noticed by its transport; until it reads on, the call's source is paused, so that what
waits in the transport is at most what had been read.
"""

import asyncio
from http import HTTPStatus
from typing import Protocol

from router.dataplane.asgi import Headers
from router.dataplane.headers import NO_BODY

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_END = b"0\r\n\r\n"


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


_STATUS_LINES = {status: _status_line(status) for status in range(200, 600)}


class Call(Protocol):
    """What a cycle is for. Nothing is called once the response is complete or the client gone."""

    def begin(self) -> None:
        """Start: the head is there, and all responses before this one are sent."""
        ...

    def feed(self, data: bytes) -> None:
        """Take bytes of the request's body; possibly before the beginning."""
        ...

    def received(self) -> None:
        """Act: the request is complete, and has begun."""
        ...

    def malformed(self) -> bool:
        """Refuse: what comes is no body. False if it is too late to say so."""
        ...

    def pause(self) -> None:
        """Send no more for now: the client does not read."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def sent(self) -> None:
        """Take note that the response is complete."""
        ...

    def client_gone(self) -> None:
        """Stop: nobody is left to read."""
        ...


class ClientConnection(Protocol):
    """What a cycle needs of the connection that it is on."""

    transport: asyncio.Transport

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than is written."""
        ...

    def answered(self, cycle: "Cycle") -> None:
        """Go on with the next request, or close."""
        ...

    def finish(self, *, drain: bool) -> None:
        """Close once all is sent; `drain` reads on, so that a client that still sends hears it."""
        ...

    def reset(self) -> None:
        """Close at once, in a way that nobody takes for an end."""
        ...


class Cycle:
    """A request's head, and the way for its response.

    `path` is as it came, without the query; `target` has both. `received`: the body is complete.
    `extra` goes into whatever response there will be.
    uvicorn reads `response_complete` and clears `keep_alive` at a shutdown.
    """

    __slots__ = (
        "_chunked", "_connection", "_ended", "_transport", "_until_close", "call", "expects",
        "extra", "headers", "keep_alive", "method", "old", "path", "received",
        "response_complete", "started", "target", "websocket",
    )  # fmt: skip

    def __init__(
        self,
        connection: ClientConnection,
        method: str,
        path: str,
        target: bytes,
        headers: Headers,
    ) -> None:
        self._connection = connection
        self._transport = connection.transport
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.call: Call | None = None
        self.old = False  # HTTP/1.0: no chunked coding, no keep-alive
        self.keep_alive = True
        self.expects = False  # a 100 Continue, before it sends its body
        self.websocket = False  # offers to go on as one
        self.extra: Headers = []
        self.received = False
        self.started = self.response_complete = False
        self._chunked = self._until_close = self._ended = False

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than is written."""
        return self._connection.full

    def go_on(self) -> None:
        """Tell a client that waits for it to send its body."""
        self.expects = False
        self._transport.write(CONTINUE)

    def start(self, status: int, headers: Headers) -> None:
        """Send status and headers, and settle how the body will be framed."""
        self.started = True
        parts = [_STATUS_LINES[status]]
        framed = status in NO_BODY or self.method == "HEAD"
        for name, value in (*headers, *self.extra) if self.extra else headers:
            if name == b"content-length":
                framed = True
            elif name == b"connection":
                self.keep_alive = False
                continue
            parts += (name, b": ", value, b"\r\n")
        if not framed:
            if self.old:
                self._until_close = True
            else:
                self._chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
        if not self.received:
            self.keep_alive = False
        parts.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._transport.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Send bytes of the body, at least one. Called per chunk."""
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self.method != "HEAD":
            self._transport.write(data)

    def end(self) -> None:
        """End the response: once the client reads, if it does not now."""
        if self._chunked:
            self._transport.write(_END)
        self._ended = True
        if not self._connection.full:
            self._complete()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response; `headers` have the body's length."""
        self.start(status, headers)
        if body:
            self.write(body)
        self.end()

    def break_off(self, last: bytes = b"") -> None:
        """End without an end, `last` before it: a client sees an error, not a whole answer."""
        if last:
            self.write(last)
        if self._until_close and not last:
            self.abandon()  # an orderly close would be an end
        else:
            self._close(drain=False)

    def abandon(self) -> None:
        """Drop the connection with all that is not sent."""
        self.response_complete = True
        self.call = None
        self._connection.reset()

    def resumed(self) -> None:
        """Take note that the client reads again."""
        if self._ended:
            self._complete()
        elif self.call is not None:
            self.call.resume()

    def _close(self, *, drain: bool) -> None:
        self.response_complete = True
        self.call = None
        self._connection.finish(drain=drain)

    def _complete(self) -> None:
        self.response_complete = True
        call, self.call = self.call, None
        if call is not None:
            call.sent()
        self._connection.answered(self)
