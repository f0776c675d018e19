"""The protocol that clients speak: uvicorn's HTTP/1.1, with the relay built into it.

Requests for the router's own paths become ASGI, by uvicorn. All others are the relay's: they go
from the parser's callbacks straight into a call, without ASGI's messages, events and task. Both
keep uvicorn's place for a request, so that its keep-alive timer, its order of pipelined requests
and its shutdown hold for both; `tests/unit/dataplane/test_inlet.py` names what is relied on.

Besides, heads, trailers and what waits behind a request are bounded; uvicorn takes any amount of
each. An offer to go on in another protocol is passed over, as HTTP allows: uvicorn passes over the
request's body with it, and Java's client, for one, makes the offer with its first request. Only a
WebSocket's is told of: who makes it can do nothing with an answer of plain HTTP.

A client that closes its sending side counts as gone: the wire looks the same when it closes all,
and a client that has left has to stop the engine at once.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.dataplane.cycle import Call, Cycle
from router.dataplane.relay import Relay

# Of what is no body: heads, trailers, chunk extensions. And one read more, at most.
HEAD_BYTES_MAX = 64 * 1024
# Requests that wait behind one that is being answered; a client that sends more at once is let go.
QUEUED_MAX = 256
# What may wait for a slow client before its engine is held back; TLS alone takes eight times that.
WRITE_BYTES_MAX = 64 * 1024
# A head that has begun to come must be there by then.
HEAD_S = 30.0
# Once closed, a connection gets this long for what its client has still to read or to send,
LINGER_S = 30.0
# and this much of what it still sends is read and dropped.
LINGER_BYTES_MAX = 256 * 2**20
_VERSIONS = ("1.1", "1.0")
# SO_LINGER, on and without any time: closing is then a reset.
_RESET = struct.pack("ii", 1, 0)


class Inlet(HttpToolsProtocol):
    """One connection of a client.

    `open_call` makes the call of a request for any path that is not in `own_paths`.
    """

    cycle: Any  # uvicorn's, or one of ours
    pipeline: Any

    def __init__(
        self,
        open_call: Callable[[Cycle], Call],
        own_paths: frozenset[bytes],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._open_call = open_call
        self._own_paths = own_paths
        self._active: Cycle | None = None  # the one that is being answered; `cycle` is the latest
        self._in_head = True
        self._head_bytes = 0
        self._websocket = False
        self._linger: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._drained_bytes: int | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; over TLS with the same bound on what waits for a slow client.

        A first request is waited for as long as the next one would be: uvicorn waits for ever.
        """
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if transport.get_extra_info("sslcontext") is not None:
            transport.set_write_buffer_limits(high=WRITE_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        """Parse what was read."""
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if self._drained_bytes is not None:
            self._drop(len(data))
            return
        self._head_bytes += len(data)
        rest: bytes | memoryview | None = data
        try:
            while rest is not None:
                rest = self._parse(rest)
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response("The head of the request is too long.")
            elif self._in_head and self._head_bytes:
                if self._head_timer is None:
                    self._head_timer = self.loop.call_later(HEAD_S, self._head_overdue)
            elif self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    def pause_writing(self) -> None:
        """Hold back whoever writes."""
        super().pause_writing()
        if self._active is not None and self._active.call is not None:
            self._active.call.pause()

    def resume_writing(self) -> None:
        """Let it write on."""
        super().resume_writing()
        if self._active is not None:
            self._active.resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for timer in (self._linger, self._head_timer):
            if timer is not None:
                timer.cancel()
        if isinstance(self.cycle, Cycle):
            self.cycle = None
        super().connection_lost(exc)
        active, self._active = self._active, None
        if active is not None and active.call is not None:
            call, active.call = active.call, None
            call.client_gone()

    # httptools

    def on_message_begin(self) -> None:
        """Make ready for a head. ASGI's scope is made when it is known to be wanted."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers, which come after the body, are dropped."""
        if not self._in_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the request, unless it has to be read again without its offer."""
        parser = self.parser
        if parser.should_upgrade():
            return
        self._in_head = False
        if self._closes:
            return  # what comes behind the last request is none
        if len(self.pipeline) == QUEUED_MAX:
            raise ValueError("too many requests behind one another")
        url = self.url
        if url[:1] != b"/":
            url = _path_of(url)
        path = url.partition(b"?")[0]
        websocket, self._websocket = self._websocket, False
        if path in self._own_paths and not websocket:
            self._into_asgi()
            return
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise ValueError("neither HTTP/1.1 nor 1.0")
        method = parser.get_method().decode("ascii")
        cycle = Cycle(self, method, path.decode("ascii"), url, self.headers)
        cycle.expects = self.expect_100_continue
        cycle.websocket = websocket
        cycle.old = version == "1.0"
        cycle.keep_alive = not cycle.old and parser.should_keep_alive()
        cycle.call = self._open_call(cycle)
        before, self.cycle = self.cycle, cycle
        if before is None or before.response_complete:
            self._begin(cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body."""
        self._head_bytes = 0
        cycle = self.cycle
        if not isinstance(cycle, Cycle):
            super().on_body(body)
        elif cycle.call is not None:
            cycle.call.feed(body)

    def on_message_complete(self) -> None:
        """End the request's body, and make ready for the next head."""
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        cycle = self.cycle
        if not isinstance(cycle, Cycle):
            super().on_message_complete()
            return
        cycle.received = True
        if cycle is self._active and cycle.call is not None:
            cycle.call.received()

    # The cycle's side.

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than is written."""
        return self.flow.write_paused

    def answered(self, cycle: Cycle) -> None:
        """Go on with the next request, or close."""
        self._active = None
        if not cycle.keep_alive:
            self.finish(drain=not cycle.received)
        self.on_response_complete()

    def finish(self, *, drain: bool) -> None:
        """Close once all is sent, and wait for that, or for the rest of a body, within bounds."""
        self._active = None
        if drain and not self.transport.is_closing():
            self._drained_bytes = 0
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self.transport.close()
        if self._linger is None:
            self._linger = self.loop.call_later(LINGER_S, self.transport.abort)

    def reset(self) -> None:
        """Close at once, in a way that nobody takes for an end."""
        self._active = None
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # uvicorn

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a request that was pipelined, or any that is ASGI's."""
        if self.pipeline:
            self.flow.pause_reading()  # uvicorn has just gone on; there is enough to do
        if isinstance(cycle, Cycle):
            # Not at once: each of a long row would stand on the stack of the one before.
            self.loop.call_soon(self._begin, cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; in the middle of a response, just close."""
        if self._closes:
            return
        if self._active is None:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _refuse(self) -> None:
        call = None if self._active is None else self._active.call
        if self._closes or call is None or not call.malformed():
            self.send_400_response("Invalid HTTP request received.")

    @property
    def _closes(self) -> bool:
        """Whether nothing more will be answered."""
        return self._drained_bytes is not None or self.transport.is_closing()

    def _begin(self, cycle: Cycle) -> None:
        if self._closes:
            return
        self._active = cycle
        if cycle.call is not None:
            cycle.call.begin()
        if cycle.call is not None and self.full:
            cycle.call.pause()

    def _head_overdue(self) -> None:
        self._head_timer = None
        # While a response is under way the client may rest; its keep-alive timer comes after it.
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The head of the request took too long.")

    def _into_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def _drop(self, count: int) -> None:
        assert self._drained_bytes is not None
        self._drained_bytes += count
        if self._drained_bytes > LINGER_BYTES_MAX:
            self.transport.abort()

    def _parse(self, data: bytes | memoryview) -> memoryview | None:
        """Parse up to the end, or to an offer; return what came behind that, None if nothing."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._pass_over():
                return memoryview(data)[offer.args[0] :]
        return None

    def _pass_over(self) -> bool:
        """Read a head again as if it offered nothing; False if its request makes no sense then."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This is no proxy.")
            return False
        version = self.parser.get_http_version().encode("ascii")
        head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
            elif b"websocket" in value.lower():
                self._websocket = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._head_bytes = 0
        self.parser.feed_data(b"".join((*head, b"\r\n")))
        return True


def protocol(relay: Relay, own_paths: Iterable[str]) -> type[asyncio.Protocol]:
    """Return the protocol for uvicorn: `own_paths` are for ASGI, all else is for the relay."""
    paths = frozenset(path.encode("ascii") for path in own_paths)
    # A cast: uvicorn calls it, and no more.
    return cast("type[asyncio.Protocol]", partial(Inlet, relay.open, paths))


def _path_of(url: bytes) -> bytes:
    """Return path and query of a URL; ValueError, which makes it a 400, if it has no path."""
    parts = httptools.parse_url(url)
    if parts.path is None:
        raise ValueError("a request for no path")
    path = cast("bytes", parts.path)
    return path + b"?" + parts.query if parts.query else path
