"""Ports for processes that cannot bind to 0 themselves."""

import socket


def free_port() -> int:
    """Return a port that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
