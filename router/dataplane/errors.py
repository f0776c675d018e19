"""The router's own errors: one table of them, in the shape that OpenAI clients read.

What an engine answers is passed on as it is. An error of the router carries `x-crossover-error`
with its code, so that a user can tell who refused. How outcomes are chosen: a 4xx of either is
`rejected` (the request's fault), 429 and 503 of an engine are `upstream_overload` (it lives, and
says no), its other 5xx and everything broken are `upstream_error`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from router.core.types import Outcome
from router.dataplane.asgi import Headers

_BAD_GATEWAY = 502


class Reply(Protocol):
    """A whole response that is not relayed as it comes."""

    @property
    def status(self) -> int:
        """Its status."""
        ...

    def body(self) -> bytes:
        """Return its body."""
        ...

    def headers(self) -> Headers:
        """Return its headers, but for the length of the body."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One of the router's own errors. `retry_after_s` is for those that pass by themselves."""

    status: int
    code: str
    message: str
    type: str = "invalid_request_error"
    retry_after_s: int | None = None
    outcome: Outcome = Outcome.REJECTED
    close: bool = False
    allow: frozenset[str] = frozenset()
    challenges: tuple[bytes, ...] = ()

    def body(self) -> bytes:
        """Return the JSON of it, as a response body or as the data of an event."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """Return it as one server-sent event."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> Headers:
        """Return the response headers that belong to it, but for the length of its body."""
        headers = [
            (b"content-type", b"application/json"),
            (b"x-crossover-error", self.code.encode("ascii")),
        ]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.allow:
            headers.append((b"allow", ", ".join(sorted(self.allow)).encode("ascii")))
        # A line for each: Chromium takes a line for one challenge, whatever commas it has.
        headers += [(b"www-authenticate", challenge) for challenge in self.challenges]
        if self.close:
            headers.append((b"connection", b"close"))
        return headers


def not_found() -> ErrorReply:
    """No such path."""
    return ErrorReply(404, "unknown_path", "This path is not relayed.")


def method_not_allowed(allow: frozenset[str]) -> ErrorReply:
    """The path takes other methods."""
    allowed = ", ".join(sorted(allow))
    return ErrorReply(405, "method_not_allowed", f"This path takes {allowed}.", allow=allow)


def control_refused(*, has_key: bool) -> ErrorReply:
    """A control path without the admin key, or in a disguise."""
    way = (
        "Send the admin key as a bearer token, and the path in its plain spelling."
        if has_key
        else "Set an admin key to allow it."
    )
    message = f"This path changes an engine's state and is not relayed. {way}"
    return ErrorReply(403, "control_path_refused", message, "permission_error")


def unauthorized(*, as_password: bool = False) -> ErrorReply:
    """No key, or a wrong one: which of the two is nobody's business."""
    message = "Incorrect API key. Send one as a bearer token, or as x-api-key."
    challenges = (b"Bearer", b'Basic realm="crossover"') if as_password else (b"Bearer",)
    return ErrorReply(401, "invalid_api_key", message, challenges=challenges)


def admin_needed(*, has_key: bool) -> ErrorReply:
    """A change of the router's own state without the admin key."""
    way = "Send the admin key as a bearer token." if has_key else "Set an admin key to allow it."
    message = f"This changes the router's state. {way}"
    return ErrorReply(403, "admin_key_needed", message, "permission_error")


def origin_refused() -> ErrorReply:
    """A browser asks for a page of an origin that is not named."""
    message = "Pages of this origin may not read answers: cors_origins does not name it."
    return ErrorReply(403, "origin_refused", message, "permission_error")


def websocket_refused() -> ErrorReply:
    """An offer to go on as a WebSocket."""
    message = "WebSockets are not supported: stream over HTTP, with server-sent events."
    return ErrorReply(501, "websocket_not_supported", message)


def invalid_value(message: str) -> ErrorReply:
    """What an operator asks for cannot be done; the message says what is allowed."""
    return ErrorReply(400, "invalid_value", message)


def target_needed(names: Iterable[str]) -> ErrorReply:
    """A request that is for one server names none, or an unknown one."""
    message = f"Name the server in x-crossover-target: {', '.join(names)}."
    return ErrorReply(400, "target_needed", message)


def target_refused() -> ErrorReply:
    """A client names a server and may not."""
    message = "Only the admin key may name a server in x-crossover-target (allow_target)."
    return ErrorReply(403, "target_refused", message, "permission_error")


def target_unknown(known: Iterable[str]) -> ErrorReply:
    """A target that is neither a server nor a role."""
    message = f"x-crossover-target must be one of {', '.join(known)}."
    return ErrorReply(400, "target_unknown", message)


def target_down(names: Iterable[str]) -> ErrorReply:
    """The request is for these servers, and none of them is up."""
    message = f"The request is for server {' or '.join(names)}, which cannot take it now."
    return _unavailable("target_down", message)


def drained(names: Iterable[str]) -> ErrorReply:
    """What could take the request is drained."""
    message = f"Server {', '.join(names)} is drained, and no other can take the request."
    return _unavailable("drained", message)


def response_unknown(response_id: str, silent: Sequence[str]) -> ErrorReply:
    """No server holds the stored response; `silent` did not say."""
    message = (
        f"No server holds response {response_id[:80]!r}: servers keep responses in memory, until"
        " they restart, and not at all with store: false."
    )
    if silent:
        message += f" Not asked, because it did not answer: {', '.join(silent)}."
    return ErrorReply(404, "response_unknown", message)


def response_elsewhere(response_id: str, server: str) -> ErrorReply:
    """The request goes on from a response that its target does not hold."""
    message = f"Response {response_id[:80]!r} is on server {server}, not in x-crossover-target."
    return ErrorReply(400, "response_elsewhere", message)


def priority_unknown(allowed: Iterable[str]) -> ErrorReply:
    """The request's class is none of ours."""
    message = f"x-crossover-priority must be one of {', '.join(allowed)}."
    return ErrorReply(400, "priority_unknown", message)


def queue_full(retry_after_s: int) -> ErrorReply:
    """No server has room, and nobody may wait any more."""
    return _busy("queue_full", "All servers are busy, and the queue is full.", retry_after_s)


def queue_shed(retry_after_s: int) -> ErrorReply:
    """A waiting batch request had to make place for an interactive one."""
    message = "All servers are busy, and the queue is needed for interactive requests."
    return _busy("queue_shed", message, retry_after_s)


def queue_timeout(limit_s: float, retry_after_s: int) -> ErrorReply:
    """The request has waited for room as long as it may."""
    return _busy("queue_timeout", f"No server had room for {limit_s:g} s.", retry_after_s)


def body_too_large(limit_bytes: int) -> ErrorReply:
    """The request body is over the limit. The rest of it is not read."""
    message = f"The request body is larger than {limit_bytes} bytes."
    return ErrorReply(413, "body_too_large", message, close=True)


def body_malformed() -> ErrorReply:
    """The body is not framed as HTTP frames one. Where it would have ended is not known."""
    return ErrorReply(400, "body_malformed", "The request body is no valid HTTP.", close=True)


def body_stalled(limit_s: float) -> ErrorReply:
    """The client began to send a body and stopped."""
    message = f"Nothing more of the request body came for {limit_s:g} s."
    return ErrorReply(408, "body_stalled", message, close=True)


def no_server() -> ErrorReply:
    """No server is up."""
    return _unavailable("no_server", "No server can take the request now.")


def shutting_down() -> ErrorReply:
    """The router stops, and this request would not have ended in time."""
    return _unavailable("shutting_down", "The router is shutting down.", close=True)


def exhausted() -> ErrorReply:
    """The router can open no more connections."""
    return _unavailable("exhausted", "The router has no connection left.")


def upstream_unreachable(server: str) -> ErrorReply:
    """No connection to the server, and no other that can take the request."""
    message = f"No connection to server {server}."
    return _upstream(_BAD_GATEWAY, "upstream_unreachable", message, retry_after_s=1)


def upstream_broken(server: str) -> ErrorReply:
    """The server closed the connection, or sent what is no HTTP, before or in its answer."""
    return _upstream(_BAD_GATEWAY, "upstream_broken", f"Server {server} broke off its answer.")


def upstream_truncated(server: str) -> ErrorReply:
    """The answer ended before its declared or customary end."""
    message = f"Server {server} ended its answer early."
    return _upstream(_BAD_GATEWAY, "upstream_truncated", message, outcome=Outcome.TRUNCATED)


def upstream_unreadable(server: str) -> ErrorReply:
    """An answer that the router has to read could not be read."""
    return _upstream(_BAD_GATEWAY, "upstream_unreadable", f"Server {server} sent no valid JSON.")


def first_byte_timeout(server: str, limit_s: float) -> ErrorReply:
    """Nothing came within the first-byte limit."""
    message = f"Server {server} sent nothing for {limit_s:g} s."
    return _upstream(504, "first_byte_timeout", message, outcome=Outcome.TIMEOUT)


def idle_timeout(server: str, limit_s: float) -> ErrorReply:
    """An answer had begun and then stood still."""
    message = f"Server {server} stopped sending for {limit_s:g} s."
    return _upstream(504, "idle_timeout", message, outcome=Outcome.TIMEOUT)


def internal() -> ErrorReply:
    """A fault of the router itself."""
    return ErrorReply(
        500, "internal", "Internal error.", "server_error", outcome=Outcome.UPSTREAM_ERROR
    )


def outcome_of(status: int) -> Outcome:
    """How an attempt that was answered with this status ended."""
    if status in (429, 503):
        return Outcome.UPSTREAM_OVERLOAD
    if status >= 500:
        return Outcome.UPSTREAM_ERROR
    return Outcome.REJECTED if status >= 400 else Outcome.OK


def _busy(code: str, message: str, retry_after_s: int) -> ErrorReply:
    return ErrorReply(429, code, message, "rate_limit_error", retry_after_s)


def _unavailable(code: str, message: str, *, close: bool = False) -> ErrorReply:
    return ErrorReply(503, code, message, "overloaded_error", retry_after_s=1, close=close)


def _upstream(
    status: int,
    code: str,
    message: str,
    *,
    retry_after_s: int | None = None,
    outcome: Outcome = Outcome.UPSTREAM_ERROR,
) -> ErrorReply:
    return ErrorReply(status, code, message, "upstream_error", retry_after_s, outcome)
