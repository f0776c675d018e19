"""What a request's head alone settles, before any of its body is read: who is let in.

Both kinds of requests pass here: those that are relayed, and those for the router's own endpoints.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from router.dataplane import errors
from router.dataplane.asgi import Headers, Message, Receive, Scope, Send
from router.dataplane.auth import Guard
from router.dataplane.cors import Cors
from router.dataplane.cycle import Cycle
from router.dataplane.errors import Reply
from router.dataplane.headers import forwarded_request
from router.dataplane.lifecycle import Lifecycle

# Of a request to an own endpoint.
BODY_BYTES_MAX = 64 * 1024
READ_BYTES_MAX = 4 * 2**20

_READ = ("GET", "HEAD", "OPTIONS")

Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Door:
    """Lets requests in, or answers them at once."""

    def __init__(
        self,
        guard: Guard | None = None,
        cors: Cors | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        self.guard = guard or Guard()
        self._cors = cors or Cors()
        self._lifecycle = lifecycle or Lifecycle()

    def reply(self, cycle: Cycle) -> Reply | None:
        """Return the answer to a request for an engine that gets no further, None if it may."""
        cycle.extra = self._cors.headers(cycle.headers)
        if not self._lifecycle.serving:
            return errors.shutting_down()
        if cycle.websocket:
            return errors.websocket_refused()
        allowed = self._cors.preflight(cycle.method, cycle.headers)
        if allowed is not None or self.guard.admits(cycle.headers):
            return allowed
        return errors.unauthorized()

    def forwarded(self, headers: Headers) -> Headers:
        """Return the request headers that go to an engine, but for what it is sent of its own."""
        return forwarded_request(self.guard.stripped(headers))

    async def own(
        self, app: Application, scope: Scope, receive: Receive, send: Send, *, to_all: bool
    ) -> None:
        """Serve a request for an endpoint of the router's own, `to_all` whoever asks."""
        headers: Headers = scope["headers"]
        extra = self._cors.headers(headers)

        async def send_with_extra(message: Message) -> None:
            if message["type"] == "http.response.start" and extra:
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        reply = self._own_reply(scope["method"], headers, to_all=to_all)
        if reply is None and scope["method"] not in _READ:
            body = await _body(receive)
            if body is None:
                reply = errors.body_too_large(BODY_BYTES_MAX)
            else:
                receive = _again(body, receive)
        if reply is None:
            await app(dict(scope), receive, send_with_extra)
        else:
            await _answer(reply, send_with_extra)

    def _own_reply(self, method: str, headers: Headers, *, to_all: bool) -> Reply | None:
        allowed = self._cors.preflight(method, headers)
        if allowed is not None:
            return allowed
        reads = method in _READ
        if not to_all and not self.guard.admits(headers, as_password=reads):
            # Browsers send a password again and again, so one can change nothing.
            return errors.unauthorized(as_password=reads)
        if not reads and not self.guard.is_admin(headers):
            return errors.admin_needed(has_key=self.guard.has_admin)
        return None


async def _body(receive: Receive) -> bytes | None:
    """Return a request's body, None if it is too long.

    What is too long is read to its end, within bounds: a client that still sends hears no answer.
    """
    body = bytearray()
    size_bytes, more = 0, True
    while more and size_bytes <= READ_BYTES_MAX:
        message = await receive()
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes <= BODY_BYTES_MAX:
            body += part
        more = message.get("more_body", False)
    return bytes(body) if size_bytes <= BODY_BYTES_MAX else None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read already."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


async def _answer(reply: Reply, send: Send) -> None:
    body = reply.body()
    headers = [*reply.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
