"""Headers across the hop: what is forwarded, what is ours, and the head of the upstream request."""

import re
from collections.abc import Iterable
from random import Random
from secrets import randbits

from router.core.types import Decision
from router.dataplane.asgi import Headers

REQUEST_ID = b"x-request-id"
TARGET = b"x-crossover-target"
SESSION = b"x-crossover-session"
PRIORITY = b"x-crossover-priority"
# What OpenAI's clients obey before they look at a status.
DO_NOT_RETRY = (b"x-should-retry", b"false")
# Statuses whose responses have no body, whatever their head says.
NO_BODY = frozenset({204, 304})

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# Set anew for the upstream request, or answered by our own HTTP server.
_REQUEST_DROPPED = _HOP_BY_HOP | {
    b"host", b"content-length", b"accept-encoding", b"expect", REQUEST_ID, TARGET, SESSION,
    PRIORITY,
}  # fmt: skip
# What browsers may do is the router's to say (cors.py).
_RESPONSE_DROPPED = _HOP_BY_HOP | {
    REQUEST_ID, b"x-crossover-server", b"x-crossover-reason", b"x-crossover-error",
    b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-allow-methods", b"access-control-allow-headers",
    b"access-control-expose-headers", b"access-control-max-age",
}  # fmt: skip
# Ids must differ, not be hard to guess: one seed from the system, and no call of it for each.
_random_bits = Random(randbits(128)).getrandbits  # noqa: S311
_REQUEST_ID_PLAIN = re.compile(rb"[\x21-\x7e]{1,128}")


def first(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header, given in lower case.

    The parser leaves blanks behind it, which are no part of it (RFC 9110, 5.5).
    """
    for key, value in headers:
        if key == name:
            return value.rstrip(b" \t")
    return None


def request_id(headers: Headers) -> str:
    """Return the client's request id if it is short and printable, else a new one."""
    given = first(headers, REQUEST_ID)
    if given is not None and _REQUEST_ID_PLAIN.fullmatch(given):
        return given.decode("ascii")
    return new_id()


def new_id() -> str:
    """Return an id that nothing else has: 32 hexadecimal digits."""
    return f"{_random_bits(128):032x}"


def own(request_id: str, decision: Decision | None = None) -> Headers:
    """Return the headers that the router adds to a response."""
    headers = [(REQUEST_ID, request_id.encode("ascii"))]
    if decision is not None:
        headers.append((b"x-crossover-server", decision.server.encode("ascii", "replace")))
        headers.append((b"x-crossover-reason", decision.reason.encode("ascii")))
    return headers


def without(headers: Headers, names: frozenset[bytes]) -> Headers:
    """Return the headers that have none of these names."""
    return [pair for pair in headers if pair[0] not in names]


def forwarded_request(headers: Headers) -> Headers:
    """Return the request headers that go to the engine."""
    return _filtered(headers, _REQUEST_DROPPED)


def forwarded_response(headers: Headers) -> Headers:
    """Return the response headers that go to the client."""
    return _filtered(headers, _RESPONSE_DROPPED)


def encode_head(
    method: str, target: bytes, host: bytes, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    """Return the head of an HTTP/1.1 request with a body of `length` bytes."""
    parts = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\nhost: ", host]
    for name, value in headers:
        parts += (b"\r\n", name, b": ", value)
    parts.append(b"\r\naccept-encoding: identity")
    if length or method not in ("GET", "HEAD"):
        parts.append(b"\r\ncontent-length: %d" % length)
    parts.append(b"\r\n\r\n")
    return b"".join(parts)


def _filtered(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    named = [value for name, value in headers if name == b"connection"]
    if not named or named in ([b"keep-alive"], [b"close"]):
        return [pair for pair in headers if pair[0] not in dropped]
    named_too = {token.strip().lower() for value in named for token in value.split(b",")}
    return [pair for pair in headers if pair[0] not in dropped and pair[0] not in named_too]
