"""The listening socket and the server on it: one process, one event loop.

At the first signal to stop it goes on listening: who comes is told that there is no more work, and
where to look for readiness finds it off. What is under way has until the drain timeout; then it is
cut short, with an error, and everything is closed. A second signal cuts short at once.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from time import monotonic

import uvicorn
import uvloop

from router.dataplane.app import CrossoverApp
from router.dataplane.control import PATHS
from router.dataplane.inlet import protocol
from router.tls import ServerTls

BACKLOG = 2048
# Above that of common clients and proxies, so that it is they who close an idle connection.
KEEP_ALIVE_S = 75
# Clients get this long to read what they have been sent last.
LAST_WORDS_S = 2.0
_POLL_S = 0.02

_log = logging.getLogger("crossover")


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
    """Uvicorn, but for its end: see above. It says when it listens; SIGTERM is an exit with 0."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: CrossoverApp,
        listening: Callable[[], None],
        reload: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app = app
        self._listening = listening
        self._reload = reload

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
        handlers = {
            signal.SIGINT: self._stop,
            signal.SIGTERM: self._stop,
            signal.SIGHUP: self._reload,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True
        self._app.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close. Uvicorn's own order refuses connections first, and knows no relay."""
        deadline = monotonic() + self._app.in_force.settings.drain_timeout_s
        self._close_idle()
        await self._until(lambda: not self._app.relay.calls, deadline)
        self._app.relay.cut_short()
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        self._close_idle()
        connections = self.server_state.connections
        await self._until(lambda: not connections, max(deadline, monotonic() + LAST_WORDS_S))
        for connection in tuple(connections):
            connection.transport.abort()
        for task in tuple(self.server_state.tasks):
            task.cancel()
        await self.lifespan.shutdown()

    def _close_idle(self) -> None:
        """Close what carries no request, and let the others close after theirs."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    async def _until(self, done: Callable[[], bool], deadline: float) -> None:
        while not (done() or self._app.lifecycle.ending or monotonic() >= deadline):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def serve(
    app: CrossoverApp,
    sock: socket.socket,
    listening: Callable[[], None],
    reload: Callable[[], None],
    tls: ServerTls | None = None,
) -> bool:
    """Serve `app` until SIGTERM or SIGINT, call `listening` once up; return whether it was.

    `reload` is called at SIGHUP, on the event loop.
    """
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
    )
    server = _Server(config, app, listening, reload)
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock]))
    return server.started
