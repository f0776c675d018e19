"""Which server a conversation was on last: its prompt's beginning is in that server's cache."""

from collections import OrderedDict

SESSIONS_MAX = 4096


class Sessions:
    """The latest sessions and their servers, as many as fit."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._server: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._server)

    def server(self, session: int | None) -> str | None:
        """Return the session's server, None if there is none or it is forgotten."""
        return None if session is None else self._server.get(session)

    def remember(self, session: int | None, server: str) -> None:
        """Take note of where a session's request goes; the oldest session gives way."""
        if session is None:
            return
        self._server[session] = server
        self._server.move_to_end(session)
        if len(self._server) > self._max:
            self._server.popitem(last=False)
