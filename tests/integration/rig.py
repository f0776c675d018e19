"""A router between real sockets: engines that do what a test tells them, and uvicorn in front.

Everything runs in one event loop, so a test can look inside as well as at the wire.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
import pytest
import uvicorn

from router.core.calibration import Calibration
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.tokens import TokenModel
from router.core.types import Role, ServerSpec
from router.dataplane.asgi import Receive, Scope, Send
from router.dataplane.auth import Guard, by_server
from router.dataplane.cors import Cors
from router.dataplane.door import Door
from router.dataplane.inlet import protocol
from router.dataplane.record import RequestRecord
from router.dataplane.relay import Relay, RelayLimits
from router.dataplane.server import Upstream
from router.dataplane.upstream import Pool
from router.settings import NO_ACCESS, Access, Admission, ClientKey, Timeouts
from router.tls import ServerTls

PATIENCE_S = 10.0
CHAT = "/v1/chat/completions"
PLAIN = b'{"messages": [{"role": "user", "content": "hi"}]}'
STREAM = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
ADMIN_KEY = "let-me-in"

# Small, for tests of backpressure: what the kernel holds is not the router's.
SOCKET_BYTES = 65536

BOTH_LOOPS = pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": True}), ("asyncio", {"use_uvloop": False})],
    ids=["uvloop", "asyncio"],
)


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Poll until it holds."""
    deadline = monotonic() + patience_s
    while not condition():
        assert monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.005)


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass
class Call:
    """One request that reached an engine, and the means to answer it in any way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: int
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    closed: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, *lines: str) -> None:
        text = "\r\n".join([f"HTTP/1.1 {status} X", *lines])
        await self.write(text.encode() + b"\r\n\r\n")

    async def stream_head(self, *lines: str) -> None:
        kind = "content-type: text/event-stream; charset=utf-8"
        await self.head(200, kind, "transfer-encoding: chunked", *lines)

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def reply(self, body: bytes, status: int = 200, *lines: str) -> None:
        length = f"content-length: {len(body)}"
        await self.head(status, "content-type: application/json", length, *lines)
        await self.write(body)

    async def stream(self, *events: bytes) -> None:
        await self.stream_head()
        for data in events:
            await self.chunk(data)
        await self.end()

    def reset(self) -> None:
        self.closed = True
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the router has closed this connection."""
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""
        self.closed = True


Script = Callable[[Call], Awaitable[None]]


async def answer(call: Call) -> None:
    await call.reply(b'{"ok": true}')


def until_set(go_on: asyncio.Event) -> Script:
    """Return the script of a stream that begins, and ends when it is told to."""

    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await go_on.wait()
        await call.chunk(DONE)
        await call.end()

    return script


class Engine:
    """An HTTP server without manners of its own. `script` answers whatever is no abort."""

    def __init__(
        self, script: Script = answer, tls: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self.script = script
        self._tls = tls
        self.calls: list[Call] = []
        self.aborts: list[Call] = []
        self.abort_script: Script = answer
        self.connections = 0
        self.open_connections = 0
        self.errors: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        scheme = "http" if tls is None else "https"
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._socket, ssl=self._tls)

    async def stop(self) -> None:
        """Close the listening socket and all connections."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer, self.connections))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        try:
            while (call := await self._read(reader, writer, number)) is not None:
                if call.target.endswith("/abort_request"):
                    self.aborts.append(call)
                    await self.abort_script(call)
                else:
                    self.calls.append(call)
                    await self.script(call)
                if call.closed:
                    break
        except ConnectionError:
            pass
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.open_connections -= 1
            writer.transport.abort()
            # A reset stays in a future of the protocol, which complains if nobody asks for it.
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Call | None:
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        pairs = [line.split(": ", 1) for line in lines]
        headers = [(name, value) for name, value in pairs]
        length = int(dict(headers).get("content-length", "0"))
        body = await reader.readexactly(length)
        return Call(reader, writer, number, method, target, headers, body)


@dataclass
class Records:
    """An observer that keeps what it is told."""

    records: list[RequestRecord] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def gap_observer(self, server: str) -> Callable[[float], None]:
        return self.gaps.append

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.outcomes[record.outcome] += 1


@dataclass
class Rig:
    """The router, its engines and its insides."""

    url: str
    engines: dict[str, Engine]
    relay: Relay
    ledger: Ledger
    health: dict[str, ServerHealth]
    pools: dict[str, Pool]
    observer: Records
    http: httpx.AsyncClient
    port: int
    server: uvicorn.Server
    verify: ssl.SSLContext | None = None

    @property
    def busy(self) -> bool:
        """Whether the router has connections of clients, or runs requests."""
        state = self.server.server_state
        return bool(state.connections or state.tasks)

    @property
    def spec(self) -> Engine:
        return self.engines["spec"]

    @property
    def base(self) -> Engine:
        return self.engines["base"]

    async def record(self, count: int = 1) -> RequestRecord:
        """Wait for so many ended requests and return the last one's record."""
        await until(lambda: len(self.observer.records) >= count)
        assert len(self.observer.records) == count
        return self.observer.records[-1]

    async def settled(self) -> None:
        """Wait until nothing is under way, and say so."""
        await until(lambda: not self.relay.calls)
        await until(lambda: len(self.ledger) == 0)
        for load in self.ledger.loads():
            assert (load.sequences, load.prefill_tokens) == (0, 0)

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.verify)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def post(
        self, path: str, body: bytes, *lines: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self.raw(request("POST", path, body, *lines))


def request(method: str, path: str, body: bytes = b"", *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: router", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, relay: Relay) -> None:
        super().__init__(config)
        self._relay = relay

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._relay.aclose()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


OWN_PATH = "/own"


async def own_page(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application behind the one path that is not the relay's: tells what it was sent."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(body)})


@contextlib.asynccontextmanager
async def serving(
    relay: Relay, idle_client_s: float, tls: ServerTls | None = None
) -> AsyncIterator[uvicorn.Server]:
    """Run uvicorn on a socket that is bound already."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        config = uvicorn.Config(
            own_page, http=protocol(relay, [OWN_PATH]), lifespan="off", log_config=None,
            access_log=False, server_header=False, date_header=False, ws="none",
            timeout_graceful_shutdown=1, timeout_keep_alive=idle_client_s,
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
        )  # fmt: skip
        server = _Server(config, relay)
        task = asyncio.get_running_loop().create_task(server.serve([sock]))
        await until(lambda: server.started or task.done())
        try:
            yield server
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def running(
    *,
    engines: dict[str, Engine] | None = None,
    policy: str = "spec-only",
    calibration: Calibration | None = None,
    timeouts: Timeouts | None = None,
    body_bytes: int = 1 << 20,
    admission: Admission | None = None,
    admin_key: str | None = ADMIN_KEY,
    client_keys: Sequence[ClientKey] = (),
    cors_origins: tuple[str, ...] = (),
    access: Mapping[str, Access] = NO_ACCESS,
    verify: ssl.SSLContext | None = None,
    tls: ServerTls | None = None,
    keepalive_s: float = 2.0,
    idle_client_s: float = 5.0,
) -> AsyncIterator[Rig]:
    """A router before a `spec` and a `base` engine. All requests go to `spec` while it is up."""
    timeouts = timeouts or Timeouts(connect_s=2.0, first_byte_s=30.0, idle_s=30.0)
    engines = engines if engines is not None else {"spec": Engine(), "base": Engine()}
    servers = [ServerSpec(name, Role(name.partition("-")[0]), e.url) for name, e in engines.items()]
    ledger = Ledger(servers)
    health = {name: ServerHealth() for name in engines}
    for state in health.values():
        state.probe_ok(monotonic())
    made = make_policy(
        policy,
        threshold=8,
        threshold_down=None,
        dwell_s=0.0,
        learner=Learner(servers, calibration=calibration),
    )
    steering = Steering(servers, made, ledger, health)
    pools = {
        server.name: Pool(
            server.url,
            connect_timeout_s=timeouts.connect_s,
            keepalive_s=keepalive_s,
            clock=monotonic,
            tls=access[server.name].tls.context() if server.name in access else None,
        )
        for server in servers
    }
    credentials = by_server(access, pools)
    upstreams = [
        Upstream(s, pools[s.name], health[s.name], TokenModel(), credentials[s.name])
        for s in servers
    ]
    observer = Records()
    limits = RelayLimits(timeouts, body_bytes, 0.05, admission or Admission())
    door = Door(Guard(client_keys, admin_key), Cors(cors_origins))
    relay = Relay(upstreams, steering, ledger, observer, limits, door=door)
    for engine in engines.values():
        await engine.start()
    relay.start()
    try:
        async with serving(relay, idle_client_s, tls) as server:
            port = server.servers[0].sockets[0].getsockname()[1]
            url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
            timeout = httpx.Timeout(PATIENCE_S)
            async with httpx.AsyncClient(
                base_url=url, timeout=timeout, trust_env=False, verify=verify or False
            ) as http:
                yield Rig(
                    url, engines, relay, ledger, health, pools, observer, http, port, server,
                    verify,
                )  # fmt: skip
    finally:
        for engine in engines.values():
            await engine.stop()
    for engine in engines.values():
        assert not engine.errors
