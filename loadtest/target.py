"""Where requests go, and the part of their head that stays the same."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Target:
    """A base URL and the head of every request to it, all but its content length."""

    url: str
    fixed_head: bytes = field(repr=False)  # it holds the key

    @classmethod
    def parse(cls, url: str, path: str, api_key: str | None = None) -> "Target":
        """Take a base URL; ValueError with a message for the user if it is none."""
        parts = urlsplit(url)
        if parts.username is not None:
            raise ValueError("a URL with a user name is not taken: keys have a flag of their own")
        try:
            port_is_good = parts.port != 0
        except ValueError:
            port_is_good = False
        if not port_is_good:
            raise ValueError(f"{url!r}: the port must be 1 to 65535")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:30000")
        lines = [
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "User-Agent: crossover-loadtest",
        ]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError("the API key has characters that no header can carry")
            lines.append(f"Authorization: Bearer {api_key}")
        return cls(url, "".join(line + "\r\n" for line in lines).encode())

    def head(self, body: bytes) -> bytes:
        """Return the head of the request that carries `body`."""
        return b"%bContent-Length: %d\r\n\r\n" % (self.fixed_head, len(body))
