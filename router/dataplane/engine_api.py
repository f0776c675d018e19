"""The few GET requests that the router makes to SGLang for itself, and how far it trusts answers.

Every answer is bounded in size and time, and a value is taken only if its type and range are right:
a server that tells nonsense is as one that tells nothing.
"""

import asyncio
import json
from typing import Any

import httpx

from router.core.types import ServerSpec

# SGLang's /health answers 503 by itself after 20 s without a sign of life from the engine.
ANSWER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 4 * 2**20


class EngineError(Exception):
    """No good answer. The text is for the operator."""


class UnreachableError(EngineError):
    """The connection was refused or broke: nobody is there."""


class NoAnswerError(EngineError):
    """Somebody is there, but gave no good answer, or none in time."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineApi:
    """Asks servers. One client for all of them, without a pool: its requests are few and far apart.

    A fresh connection each time also proves that the server accepts one.
    """

    def __init__(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close the client."""
        await self._client.aclose()

    async def get(self, server: ServerSpec, path: str) -> bytes:
        """Return the body of a 200 answer; UnreachableError or NoAnswerError otherwise."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(f"{server.url}{path}", path)
        except TimeoutError:
            raise NoAnswerError(f"GET {path}: no answer in {self._timeout_s:g} s") from None

    async def get_json(self, server: ServerSpec, path: str) -> dict[str, Any]:
        """Return the object that the body of a 200 answer is."""
        body = await self.get(server, path)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise NoAnswerError(f"GET {path}: not JSON") from None
        if not isinstance(answer, dict):
            raise NoAnswerError(f"GET {path}: not a JSON object")
        return answer

    async def _get(self, url: str, path: str) -> bytes:
        try:
            async with self._client.stream("GET", url) as response:
                if response.status_code != httpx.codes.OK:
                    status = response.status_code
                    raise NoAnswerError(f"GET {path}: HTTP {status}", status)
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        raise NoAnswerError(f"GET {path}: more than {ANSWER_BYTES_MAX} bytes")
                return bytes(body)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise UnreachableError(f"GET {path}: {str(error) or type(error).__name__}") from error
        except httpx.TimeoutException as error:
            raise NoAnswerError(f"GET {path}: {type(error).__name__}") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise NoAnswerError(f"GET {path}: {str(error) or type(error).__name__}") from error
