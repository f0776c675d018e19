"""TLS on both sides: how clients reach the router, and how it reaches its servers.

Contexts are made of files, so a problem with one is told at the start, by file, and not by the
first connection.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

# The relay speaks nothing else; a proxy between would otherwise be free to choose HTTP/2.
_PROTOCOLS = ("http/1.1",)


class TlsError(Exception):
    """A file cannot be used. The text is for the operator, and names it."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How the router proves itself to clients. `key_file` None: the key is in `cert_file` too."""

    cert_file: str
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for a listening socket; TlsError if the files do not make one."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _load_pair(context, self.cert_file, self.key_file)
        context.set_alpn_protocols(_PROTOCOLS)
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How the router checks a server, and proves itself to it.

    `ca_file` None: the system's certificate authorities. `verify` False: whoever answers is taken
    for the server.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Return the context for connections to the server; TlsError as above."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            _check_readable(self.ca_file)
            try:
                context.load_verify_locations(cafile=self.ca_file)
            except ssl.SSLError:
                raise TlsError(f"{self.ca_file}: expected certificates, in PEM") from None
        if self.cert_file is not None:
            _load_pair(context, self.cert_file, self.key_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(_PROTOCOLS)
        return context


def _load_pair(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    for path in filter(None, (cert_file, key_file)):
        _check_readable(path)
    try:
        # A password, though none: else a key that needs one asks whoever started the router.
        context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError:
        both = cert_file if key_file is None else f"{cert_file}, {key_file}"
        raise TlsError(
            f"{both}: expected a certificate and its private key without a password, in PEM"
        ) from None


def _check_readable(path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TlsError(f"{path}: cannot be read: {reason}") from None
