"""The few requests that the router makes to SGLang for itself, and how far it trusts answers.

Every answer is bounded in size and time, and a value is taken only if its type and range are right:
a server that tells nonsense is as one that tells nothing.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from router.core.types import ServerSpec
from router.dataplane.auth import Credentials
from router.settings import NO_ACCESS, Access

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
    """Asks servers. A client for each, without a pool: its requests are few and far apart.

    A fresh connection each time also proves that the server accepts one. `access` is by server.
    """

    def __init__(
        self, timeout_s: float = ANSWER_TIMEOUT_S, access: Mapping[str, Access] = NO_ACCESS
    ) -> None:
        self._timeout_s = timeout_s
        self._access = access
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def aclose(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            await client.aclose()

    def _client(self, server: ServerSpec) -> httpx.AsyncClient:
        client = self._clients.get(server.name)
        if client is None:
            access = self._access.get(server.name, Access())
            https = server.url.startswith("https:")
            client = self._clients[server.name] = httpx.AsyncClient(
                timeout=httpx.Timeout(
                    self._timeout_s, connect=min(CONNECT_TIMEOUT_S, self._timeout_s)
                ),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
                follow_redirects=False,
                headers=dict(Credentials.of(access).put_on([])),
                verify=access.tls.context() if https else False,
            )
        return client

    async def get(self, server: ServerSpec, path: str) -> bytes:
        """Return the body of a 200 answer; UnreachableError or NoAnswerError otherwise."""
        return await self._answer(server, "GET", path)

    async def get_json(self, server: ServerSpec, path: str) -> dict[str, Any]:
        """Return the object that the body of a 200 answer is."""
        return _object(await self.get(server, path), f"GET {path}")

    async def post_json(self, server: ServerSpec, path: str, content: object) -> dict[str, Any]:
        """Return the object that the body of a 200 answer to a JSON body is."""
        return _object(await self.post(server, path, content), f"POST {path}")

    async def post(self, server: ServerSpec, path: str, content: object) -> bytes:
        """Return the body of a 200 answer to a JSON body."""
        return await self._answer(server, "POST", path, content)

    async def _answer(
        self, server: ServerSpec, method: str, path: str, content: object = None
    ) -> bytes:
        what = f"{method} {path}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client(server).stream(
                    method, f"{server.url}{path}", json=content
                ) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    status = response.status_code
                    raise NoAnswerError(f"{what}: HTTP {status}", status)
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        raise NoAnswerError(f"{what}: more than {ANSWER_BYTES_MAX} bytes")
                return bytes(body)
        except TimeoutError:
            raise NoAnswerError(f"{what}: no answer in {self._timeout_s:g} s") from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise UnreachableError(f"{what}: {str(error) or type(error).__name__}") from error
        except httpx.TimeoutException as error:
            raise NoAnswerError(f"{what}: {type(error).__name__}") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise NoAnswerError(f"{what}: {str(error) or type(error).__name__}") from error


def _object(body: bytes, what: str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise NoAnswerError(f"{what}: not JSON") from None
    if not isinstance(answer, dict):
        raise NoAnswerError(f"{what}: not a JSON object")
    return answer
