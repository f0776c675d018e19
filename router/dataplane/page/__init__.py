"""The live page at `/crossover/`: four files, served with their hash, under a strict CSP.

It needs nothing from elsewhere, and changes nothing but with the admin key. A page asks for the
JSON endpoints every second and says that an answer of that age is good enough; `Kept` then works an
answer out once for all pages that are open.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

PAGE = "/crossover/"
_BARE = "/crossover"
_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        PAGE: ("page.html", "text/html; charset=utf-8"),
        f"{PAGE}page.css": ("page.css", "text/css; charset=utf-8"),
        f"{PAGE}page.js": ("page.js", "text/javascript; charset=utf-8"),
        f"{PAGE}operate.js": ("operate.js", "text/javascript; charset=utf-8"),
    }
)
PAGE_PATHS = frozenset({_BARE, *_TYPES})

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, but asked for: an upgrade shows at once
}
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])")

# However old an answer a client would take.
AGE_S_MAX = 1.0


class Kept:
    """A JSON answer, worked out anew where the latest is too old for the one who asks."""

    def __init__(self, compute: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._compute = compute
        self._clock = clock
        self._body = b""
        self._at: float | None = None

    def answer(self, request: Request) -> Response:
        """Answer a request; one without `cache-control: max-age` gets what holds now."""
        now = self._clock()
        age_s_max = _age_s_max(request.headers.get("cache-control", ""))
        if self._at is None or now - self._at >= age_s_max:
            self._body, self._at = orjson.dumps(self._compute()), now
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(self._body, media_type="application/json", headers=headers)


def _age_s_max(cache_control: str) -> float:
    found = _MAX_AGE.search(cache_control)
    return 0.0 if found is None else min(AGE_S_MAX, float(found[1]))


def add_page(app: FastAPI) -> None:
    """Serve the page's files on an application."""
    for path, (name, media_type) in _TYPES.items():
        _add_file(app, path, files(__name__).joinpath(name).read_bytes(), media_type)

    @app.api_route(_BARE, methods=["GET", "HEAD"])
    async def bare() -> RedirectResponse:
        """Go where relative links hold."""
        return RedirectResponse(PAGE, status_code=308)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": etag}

    @app.api_route(path, methods=["GET", "HEAD"])
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)
