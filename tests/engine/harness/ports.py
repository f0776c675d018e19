"""Ports for processes that cannot bind to 0 themselves."""

import socket

PORT_MAX = 55_000  # SGLang derives a second port by adding 10,000
ATTEMPTS_MAX = 100


def free_port() -> int:
    """Return a port that nobody listened on just now."""
    for _ in range(ATTEMPTS_MAX):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= PORT_MAX:
            return port
    raise RuntimeError("no free port")
