"""Telling an engine that nobody waits for a request any more.

A closed connection alone is noticed late: SGLang looks for it every few seconds. `/abort_request`
is heard at once. Aborts are courtesy: few at a time, for a few seconds, and a failed one is counted
and logged, never raised.
"""

import asyncio
import logging

import orjson

from router.dataplane.fetch import fetch
from router.dataplane.headers import encode_head
from router.dataplane.upstream import Pool, UpstreamError

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
CONCURRENT_MAX = 32
PENDING_MAX = 4096
_REPLY_BYTES_MAX = 64 * 1024


class Aborter:
    """Sends aborts, in the background.

    `sent` were heard, `failed` were not, `dropped` were one too many.
    """

    def __init__(self, *, concurrent_max: int = CONCURRENT_MAX, pending_max: int = PENDING_MAX):
        self._slots = asyncio.Semaphore(concurrent_max)
        self._pending_max = pending_max
        self._patience_s = TIMEOUT_S
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.failed = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Aborts not yet answered."""
        return len(self._tasks)

    def abort(self, pool: Pool, server: str, rid: str, authorization: bytes | None) -> None:
        """Abort one request.

        It carries the request's own authorization: an engine may demand a key here too.
        """
        if len(self._tasks) >= self._pending_max:
            self.dropped += 1
            return
        task = asyncio.get_running_loop().create_task(self._send(pool, server, rid, authorization))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Give the aborts under way one timeout to be heard, and drop the rest."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self._patience_s)
        self._drop()

    def hurry(self) -> None:
        """Drop the aborts under way, and let `aclose` wait for none."""
        self._patience_s = 0.0
        self._drop()

    def _drop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _send(self, pool: Pool, server: str, rid: str, authorization: bytes | None) -> None:
        body = orjson.dumps({"rid": rid})
        headers = [(b"content-type", b"application/json")]
        if authorization is not None:
            headers.append((b"authorization", authorization))
        target = pool.base_path + b"/abort_request"
        head = encode_head("POST", target, pool.host, headers, len(body))
        try:
            async with self._slots:
                reply = await fetch(
                    pool, head, body, timeout_s=TIMEOUT_S, limit_bytes=_REPLY_BYTES_MAX
                )
        except (UpstreamError, TimeoutError) as error:
            self._note_failure(server, str(error) or "no answer in time")
            return
        if reply.status == 200:
            self.sent += 1
        else:
            self._note_failure(server, f"status {reply.status}")

    def _note_failure(self, server: str, error: str) -> None:
        self.failed += 1
        logger.warning("abort not heard by server %s: %s", server, error)
