"""Keys and certificates of a configuration: from files and variables to `Security`, or to problems.

No key is ever part of a message: a file is named, or a variable, and the line in it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.bounded_file import FileError, read_bytes
from router.kinds import Secret
from router.server_list import Placed
from router.settings import Access, ClientKey, Security
from router.tls import ClientTls, ServerTls, TlsError

KEY_BYTES_MAX = 4096
CLIENT_KEYS_MAX = 1024
CLIENT_KEYS_BYTES_MAX = 2**20

_ONE_KEY = "one line of printable ASCII without blanks, the key"
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,31}):(.+)")
# What the name of an option for all servers begins with; without it, it is a key of one server.
_ALL = "upstream_"


class Reading:
    """Reads what a configuration names; appends what is wrong with it to `problems`.

    `values` and `origins` are the options' values, and where each is from.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        origins: Mapping[str, str],
        environ: Mapping[str, str],
        problems: list[str],
    ) -> None:
        self._values = values
        self._origins = origins
        self._environ = environ
        self._problems = problems

    def security(self, servers: Sequence[Placed]) -> Security:
        """Return all keys and certificates."""
        admin_key = self._secret("admin_key")
        return Security(
            client_keys=self._client_keys(admin_key),
            admin_key=admin_key,
            access={each.server.name: access for each in servers if (access := self._access(each))},
            tls=self._listening(),
            cors_origins=self._values["cors_origins"],
        )

    def _client_keys(self, admin_key: str | None) -> tuple[ClientKey, ...]:
        given = self._given("client_keys", CLIENT_KEYS_BYTES_MAX)
        if given is None:
            return ()
        text, where = given
        keys: dict[str, ClientKey] = {}
        # In a variable, a comma ends a key as well as a line does in a file.
        lines = re.split(r"[\n,]" if self._values["client_keys"] is not None else r"\n", text)
        for number, line in enumerate(lines, 1):
            word = line.strip()
            if not word or word.startswith("#"):
                continue
            named = _NAMED.fullmatch(word)
            name, key = (named[1], named[2]) if named else (None, word)
            problem = _key_problem(key)
            if key in keys:
                problem = "a key that is there before, expected each once"
            elif key == admin_key:
                problem = "the admin key, expected another one for clients"
            if problem is not None:
                self._problems.append(f"{where} line {number}: {problem}")
                return ()
            keys[key] = ClientKey(key, name)
        if not 1 <= len(keys) <= CLIENT_KEYS_MAX:
            self._problems.append(
                f"{where}: {len(keys)} keys, expected 1 to {CLIENT_KEYS_MAX}, one a line"
            )
        return tuple(keys.values())

    def _secret(self, name: str) -> str | None:
        """Return the key in the file or variable of an option."""
        given = self._given(name, KEY_BYTES_MAX)
        return None if given is None else _one_key(*given, self._problems)

    def _given(self, name: str, bytes_max: int) -> tuple[str, str] | None:
        """Return the text that `name` or `name`_file gives, and where it is from."""
        variable, path = self._values[name], self._values[f"{name}_file"]
        if isinstance(variable, Secret):
            where = self._origins[name]
            if path is not None:
                other = self._origins[f"{name}_file"]
                self._problems.append(f"{other}: {where} is set too, expected only one of the two")
                return None
            return variable.text, where
        if path is None:
            return None
        return _text(path, self._origins[f"{name}_file"], bytes_max, self._problems)

    def _access(self, placed: Placed) -> Access | None:
        """Return how one server lets the router in, None if there is nothing to say of it."""
        before = len(self._problems)
        api_key = self._server_key(placed, "api_key")
        admin_key = self._server_key(placed, "admin_key")
        tls = ClientTls(
            ca_file=self._of(placed, "ca_file"),
            cert_file=self._of(placed, "cert_file"),
            key_file=self._of(placed, "cert_key_file"),
            verify=self._of(placed, "verify"),
        )
        if placed.server.url.startswith("https:"):
            try:
                tls.context()
            except TlsError as error:
                self._problems.append(f"{placed.where}: {error}")
        elif set(placed.access).intersection(("ca_file", "cert_file", "verify")):
            self._problems.append(
                f"{placed.where}: certificates with {placed.server.url}, expected an https URL"
            )
        access = Access(api_key, admin_key, tls)
        return None if access == Access() or len(self._problems) > before else access

    def _server_key(self, placed: Placed, name: str) -> str | None:
        variable = placed.access.get(f"{name}_env")
        path = placed.access.get(f"{name}_file")
        if variable is not None and path is not None:
            self._problems.append(
                f"{placed.where}: {name}_env and {name}_file, expected only one of the two"
            )
            return None
        if variable is not None:
            where = f"{placed.where}: environment {variable}"
            return _one_key(self._environ.get(variable, ""), where, self._problems)
        if path is not None:
            return read_key(path, placed.where, self._problems)
        return self._secret(_ALL + name)

    def _of(self, placed: Placed, name: str) -> Any:
        return placed.access.get(name, self._values[_ALL + name])

    def _listening(self) -> ServerTls | None:
        cert_file, key_file = self._values["tls_cert_file"], self._values["tls_key_file"]
        if cert_file is None:
            if key_file is not None:
                where = self._origins["tls_key_file"]
                self._problems.append(f"{where}: a key without tls_cert_file")
            return None
        tls = ServerTls(cert_file, key_file)
        try:
            tls.context()
        except TlsError as error:
            self._problems.append(f"{self._origins['tls_cert_file']}: {error}")
        return tls


def read_key(path: str, where: str, problems: list[str]) -> str | None:
    """Return the key in a file; append what is wrong with it to `problems`."""
    read = _text(path, where, KEY_BYTES_MAX, problems)
    return None if read is None else _one_key(*read, problems)


def _text(path: str, where: str, bytes_max: int, problems: list[str]) -> tuple[str, str] | None:
    """Return a file's text, and where it is from; None if it cannot be read."""
    try:
        data = read_bytes(path, bytes_max)
    except FileError as error:
        problems.append(f"{where}: {error}")
        return None
    return data.decode("utf-8", "replace"), f"{where}: {path}"


def _one_key(text: str, where: str, problems: list[str]) -> str | None:
    """Return the key that a text is, None if it is none."""
    problem = _key_problem(text.strip())
    if problem is not None:
        problems.append(f"{where}: {problem}")
        return None
    return text.strip()


def _key_problem(key: str) -> str | None:
    """Return what is wrong with a key, without showing it."""
    if key and key.isascii() and key.isprintable() and " " not in key and len(key) <= KEY_BYTES_MAX:
        return None
    return f"expected {_ONE_KEY}, in {KEY_BYTES_MAX} bytes at most"
