"""The listening socket and the server on it: one process, one event loop."""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from router.dataplane.app import CrossoverApp
from router.dataplane.control import PATHS
from router.dataplane.inlet import protocol
from router.tls import ServerTls

BACKLOG = 2048
# Above that of common clients and proxies, so that it is they who close an idle connection.
KEEP_ALIVE_S = 75
# Requests in flight at SIGTERM are given this long.
SHUTDOWN_S = 2


class BindError(Exception):
    """The address cannot be listened on. The text is for the user."""


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, or say in one line why there is none."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise BindError(f"cannot listen on {host}:{port}: {reason}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket, tls: ServerTls | None = None) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_file_limit() -> None:
    """Allow as many open files as the system does: a stream holds two, and shells allow 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def calm_collector() -> None:
    """Look for cyclic garbage rarely, and never among what is there at the start.

    A request leaves none (`tests/integration/test_relay_soak.py`), and looking through a thousand
    streams' objects stops them all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class _Server(uvicorn.Server):
    """Uvicorn, with two differences: it says when it listens, and SIGTERM is an exit with 0."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            calm_collector()
            self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The stock method raises the signal again once all is closed, for parents that look at it:
        # a supervisor then reads an orderly stop as a crash.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def serve(
    app: CrossoverApp,
    sock: socket.socket,
    listening: Callable[[], None],
    tls: ServerTls | None = None,
) -> bool:
    """Serve `app` until SIGTERM or SIGINT, call `listening` once up; return whether it was."""
    config = uvicorn.Config(
        app,
        http=protocol(app.relay, PATHS),
        ws="none",
        interface="asgi3",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_context_factory=None if tls is None else lambda *_: tls.context(),
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config, listening)
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock]))
    return server.started
