"""Who a request is from, by the key that it carries, and the keys that the router itself carries.

A key is looked up by its digest under a secret of this process: whoever guesses keys cannot aim at
a digest, so how long a look takes tells nothing of how near a guess was.
"""

import hashlib
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes

from router.dataplane.asgi import Headers
from router.dataplane.headers import first, without
from router.settings import Access, ClientKey

AUTHORIZATION = b"authorization"
# Where Anthropic's clients put it.
API_KEY = b"x-api-key"
_CARRIERS = frozenset({AUTHORIZATION, API_KEY})


class Guard:
    """Tells clients and the operator from everybody else. Without client keys, all are clients."""

    def __init__(self, client_keys: Sequence[ClientKey] = (), admin_key: str | None = None) -> None:
        self._secret = token_bytes(32)
        self._clients = frozenset(self._digest(client.key.encode()) for client in client_keys)
        self._admin = None if admin_key is None else self._digest(admin_key.encode())

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key at all."""
        return self._admin is not None

    def admits(self, headers: Headers, *, as_password: bool = False) -> bool:
        """Whether the request may be served.

        `as_password`: browsers may send a key as the password of any user.
        """
        if not self._clients:
            return True
        digests = {self._digest(key) for key in _keys(headers, as_password=as_password)}
        return not digests.isdisjoint(self._clients) or self._admin in digests

    def is_admin(self, headers: Headers) -> bool:
        """Whether the request carries the admin key, as a bearer token."""
        return self._admin is not None and self._admin in map(self._digest, _keys(headers))

    def stripped(self, headers: Headers) -> Headers:
        """Return the headers without keys that are the router's: they are no engine's business."""
        if self._clients or self.is_admin(headers):
            return without(headers, _CARRIERS)
        return headers

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the router sends to one server as `authorization`; `admin` with what changes it."""

    normal: bytes | None = None
    admin: bytes | None = None

    @classmethod
    def of(cls, access: Access) -> "Credentials":
        """Return the credentials for a server."""
        admin_key = access.admin_key or access.api_key
        return cls(_bearer(access.api_key), _bearer(admin_key))

    def put_on(self, headers: Headers, *, admin: bool = False) -> Headers:
        """Return the headers with these credentials in place of the client's, if there are any."""
        value = self.admin if admin else self.normal
        if value is None:
            return headers
        return [*without(headers, _CARRIERS), (AUTHORIZATION, value)]


NO_CREDENTIALS = Credentials()


def by_server(access: Mapping[str, Access], names: Iterable[str]) -> dict[str, Credentials]:
    """Return the credentials for each server, known or not."""
    return {name: Credentials.of(access.get(name, Access())) for name in names}


def _bearer(key: str | None) -> bytes | None:
    return None if key is None else b"Bearer " + key.encode("ascii")


def _keys(headers: Headers, *, as_password: bool = False) -> list[bytes]:
    """Return the keys that a request carries: one in each header, or none."""
    scheme, _, word = (first(headers, AUTHORIZATION) or b"").partition(b" ")
    keys = [first(headers, API_KEY)]
    match scheme.lower():
        case b"bearer":
            keys.append(word)
        case b"basic" if as_password:
            keys.append(_password(word))
    return [key for key in keys if key]


def _password(word: bytes) -> bytes | None:
    try:
        return b64decode(word, validate=True).partition(b":")[2]
    except Base64Error:
        return None
