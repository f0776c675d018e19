"""Finding the server that holds a stored response of `/v1/responses`.

What the router has seen come by it remembers. For what it does not remember, such as a response
from before its start, it asks the servers; what one of them holds is remembered from then on.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from router.core.response_servers import ResponseServers
from router.dataplane.asgi import Headers
from router.dataplane.fetch import fetch
from router.dataplane.headers import encode_head
from router.dataplane.server import Upstream
from router.dataplane.upstream import UpstreamError

# So long may a server take to say whether it holds a response, and so many are asked for at once.
ASK_TIMEOUT_S = 5.0
CONCURRENT_MAX = 32
ID_CHARS_MAX = 256
_ANSWER_BYTES_MAX = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Found:
    """Which server holds a response, None if none does; and who could not be asked."""

    server: str | None
    silent: Sequence[str] = ()


class StoredResponses:
    """Knows, or finds out, where stored responses are."""

    def __init__(self, upstreams: Mapping[str, Upstream], clock: Callable[[], float]) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._known = ResponseServers()
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)

    def seen(self, response_id: str, server: str) -> None:
        """Take note that `server` made a response."""
        self._known.remember(response_id, server, self._clock())

    def server_of(self, response_id: str) -> str | None:
        """Return the server that holds a response, None if it has to be looked for."""
        if len(self._upstreams) == 1:
            return next(iter(self._upstreams))
        return self._known.server_of(response_id, self._clock())

    async def find(self, response_id: str, headers: Headers) -> Found:
        """Ask every server for a response; `headers` are those of the request."""
        if len(response_id) > ID_CHARS_MAX:
            return Found(None)
        silent: list[str] = []
        async with self._slots:
            asked = [
                asyncio.create_task(self._ask(upstream, response_id, headers))
                for upstream in self._upstreams.values()
            ]
            try:
                holds = await asyncio.gather(*asked)
            finally:
                for task in asked:
                    task.cancel()
        for name, held in zip(self._upstreams, holds, strict=True):
            if held:
                self.seen(response_id, name)
                return Found(name)
            if held is None:
                silent.append(name)
        return Found(None, silent)

    async def _ask(self, upstream: Upstream, response_id: str, headers: Headers) -> bool | None:
        """Return whether a server holds a response, None if it does not say."""
        pool = upstream.pool
        target = pool.base_path + b"/v1/responses/" + quote(response_id, safe="").encode("ascii")
        head = encode_head("GET", target, pool.host, upstream.credentials.put_on(headers), 0)
        try:
            answer = await fetch(pool, head, timeout_s=ASK_TIMEOUT_S, limit_bytes=_ANSWER_BYTES_MAX)
        except (UpstreamError, TimeoutError):
            return None
        return answer.status == 200
