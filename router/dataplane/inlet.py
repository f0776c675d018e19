"""The protocol that clients speak: uvicorn's HTTP/1.1, with three differences.

The head of a request is bounded; uvicorn takes one of any length. An offer to go on in another
protocol is passed over, as HTTP allows: uvicorn passes over the request's body with it, and Java's
client, for one, makes the offer with its first request. And a connection that is closed while its
client does not read is closed within a minute or two, not when the client pleases.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.dataplane.asgi import Send

# And one read more, at most.
HEAD_BYTES_MAX = 64 * 1024
# Once closed, a connection gets this long for each 64 KiB or so that are still to be read.
LINGER_S = 60.0


def cycle_of(send: Send) -> RequestResponseCycle | None:
    """Return uvicorn's response behind an ASGI `send`; None if it is another server's."""
    cycle = getattr(send, "__self__", None)
    return cycle if isinstance(cycle, RequestResponseCycle) else None


def takes_chunks(cycle: RequestResponseCycle) -> bool:
    """Tell whether `send` would just frame a chunk and write it at once. Called per chunk."""
    return (
        cycle.chunked_encoding is True
        and not cycle.flow.write_paused
        and not cycle.disconnected
        and not cycle.response_complete
    )


class Inlet(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Watch that a client that does not read does not hold a closed connection for good."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """The client reads."""
        self._forget_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._forget_unread()
        super().connection_lost(exc)

    def _watch_unread(self) -> None:
        self._unread = asyncio.get_running_loop().call_later(LINGER_S, self._end_unread)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _end_unread(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self._watch_unread()

    def data_received(self, data: bytes) -> None:
        """Parse what was read."""
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        """Start the request, unless it has to be read again without its offer."""
        if self.parser.should_upgrade():
            return
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body, and make ready for the next head."""
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def _pass_over(self, rest: bytes) -> None:
        """Read a request again as if it offered nothing. `rest` is what came behind its head."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This is no proxy.")
            return
        head = [method, b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(b"".join((*head, b"\r\n", rest)))
