"""Which server holds which stored response of `/v1/responses`.

An engine keeps the responses that it made in its own memory, so a request that continues, reads or
cancels one has to go where it was made. What is remembered here is bounded in number and in time;
what was forgotten can still be asked for from the servers.
"""

from collections import OrderedDict

RESPONSES_MAX = 65_536
KEPT_S = 24 * 3600.0


class ResponseServers:
    """A response id's server, the ids that were named longest ago forgotten first."""

    def __init__(self, size_max: int = RESPONSES_MAX, kept_s: float = KEPT_S) -> None:
        self._size_max = size_max
        self._kept_s = kept_s
        self._named: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._named)

    def remember(self, response_id: str, server: str, now: float) -> None:
        """Take note that `server` holds the response. `now` is monotonic, in seconds."""
        self._named[response_id] = (server, now)
        self._named.move_to_end(response_id)
        self._forget(now)

    def server_of(self, response_id: str, now: float) -> str | None:
        """Return the server that holds a response, None if that is not known."""
        self._forget(now)
        named = self._named.get(response_id)
        if named is None:
            return None
        self.remember(response_id, named[0], now)
        return named[0]

    def _forget(self, now: float) -> None:
        while self._named:
            oldest, (_, named_at) = next(iter(self._named.items()))
            if len(self._named) <= self._size_max and now - named_at < self._kept_s:
                return
            del self._named[oldest]
