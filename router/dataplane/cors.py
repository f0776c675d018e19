"""Which web pages of other origins may read answers: those that the settings name.

The router decides alone: what an engine says of it is dropped (headers.py). An origin that is not
named is told nothing, so its browser keeps the answer from the page.
"""

import re
from dataclasses import dataclass

from router.dataplane import errors
from router.dataplane.asgi import Headers
from router.dataplane.errors import Reply
from router.dataplane.headers import first

EXPOSED = (
    b"x-request-id, x-crossover-server, x-crossover-reason, x-crossover-error, retry-after,"
    b" x-should-retry"
)
# Browsers ask again after this.
_MAX_AGE_S = b"600"
_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


@dataclass(frozen=True, slots=True)
class _Allowed:
    names: bytes | None
    status: int = 200  # not 204: that takes no content-length, which all answers have

    def body(self) -> bytes:
        return b""

    def headers(self) -> Headers:
        headers = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if self.names is not None:
            headers.append((b"access-control-allow-headers", self.names))
        return headers


class Cors:
    """The origins that are let in, `*` being any; none: nothing is said to anybody."""

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origin.encode("ascii") for origin in origins)
        self._any = b"*" in self._origins

    def headers(self, request: Headers) -> Headers:
        """Return what the answer to a request tells browsers."""
        if not self._origins:
            return []
        varies = [] if self._any else [(b"vary", b"origin")]
        origin = first(request, b"origin")
        if origin is None or not self._allows(origin):
            return varies
        return [
            *varies,
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", EXPOSED),
        ]

    def preflight(self, method: str, request: Headers) -> Reply | None:
        """Return the answer to a browser that asks whether it may; None if the request is none."""
        origin = first(request, b"origin")
        asked = first(request, b"access-control-request-method")
        if method != "OPTIONS" or not self._origins or origin is None or asked is None:
            return None
        if not self._allows(origin):
            return errors.origin_refused()
        # They are of a page that may send any; a star would leave out `authorization`.
        names = first(request, b"access-control-request-headers")
        return _Allowed(names if names and _HEADER_NAMES.fullmatch(names) else None)

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._origins
