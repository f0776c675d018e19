"""The simulated engine as a server: SGLang 0.5.12.post1's HTTP interface over an engine model.

One process may host several engines, each on a port of its own; with the layout `shared` they share
their GPUs.
"""

import argparse
import asyncio
import gc
import random
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from typing import Self
from urllib.parse import parse_qs

from loadtest.engine_model import Gpu
from loadtest.engine_params import EngineParams
from loadtest.engines import ENGINES
from loadtest.sim_driver import Driver
from loadtest.sim_http import Connection, Exchange, Request, encode
from loadtest.sim_metrics import page
from loadtest.sim_replies import Reply, refuse
from loadtest.sim_requests import Api, RefusedError, flat_error, parse_body, parse_call
from loadtest.sim_status import loads, model_info, model_list, server_info
from loadtest.sim_streams import make_reply
from loadtest.switching import SwitchingEngine, make_engine
from router.core.types import Layout

MODEL_NAME = "crossover-sim"
BACKLOG = 2048
_APIS = {api.value: api for api in Api}
_SPEC = re.compile(
    r"(?P<name>[^=]+)=(?P<model>[^:@]+)(?:@(?P<threshold>[0-9]{1,6}))?:(?P<port>[0-9]{1,5})"
)

Route = Callable[[Request, Exchange], None]


class Routes:
    """One engine's HTTP interface."""

    def __init__(self, driver: Driver, model_name: str, disconnect_s: float = 0.0) -> None:
        self._driver = driver
        self._model_name = model_name
        self._disconnect_s = disconnect_s
        gets: dict[str, Route] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/v1/loads": self._loads,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/flush_cache": self._flush_cache,
        }
        posts: dict[str, Route] = {
            **dict.fromkeys(_APIS, self._generate),
            "/abort_request": self._abort,
            "/flush_cache": self._flush_cache,
        }
        self._routes: Mapping[tuple[str, str], Route] = {
            **{("GET", path): route for path, route in gets.items()},
            **{("POST", path): route for path, route in posts.items()},
            ("PUT", Api.GENERATE.value): self._generate,
        }

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer a request."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            allowed = sorted(method for method, path in self._routes if path == request.path)
            if allowed:
                body, allow = encode({"detail": "Method Not Allowed"}), ", ".join(allowed).encode()
                exchange.whole(405, body, b"application/json", b"allow: " + allow)
            else:
                exchange.json(404, encode({"detail": "Not Found"}))
            return
        try:
            route(request, exchange)
        except RefusedError as error:
            refuse(error, exchange)

    def _generate(self, request: Request, exchange: Exchange) -> None:
        driver = self._driver
        context_tokens = driver.engine.params.context_tokens
        call = parse_call(_APIS[request.path], request.body, request.content_type, context_tokens)
        for ask in call.asks:
            if ask.rid in driver.by_rid:
                message = f"Duplicate request ID detected: {ask.rid}"
                raise RefusedError(400, flat_error(400, message, "BadRequestError"))
        reply = make_reply(call, exchange, driver.now())
        exchange.on_close = lambda: self._client_gone(reply)
        exchange.on_resume = reply.resume
        driver.start(reply)

    def _client_gone(self, reply: Reply) -> None:
        if self._disconnect_s:
            asyncio.get_running_loop().call_later(
                self._disconnect_s, self._driver.abort, reply.outputs
            )
        else:
            self._driver.abort(reply.outputs)

    def _abort(self, request: Request, exchange: Exchange) -> None:
        body = parse_body(request.body)
        self._driver.abort_matching(str(body.get("rid") or ""), bool(body.get("abort_all")))
        exchange.empty(200)

    def _health(self, _: Request, exchange: Exchange) -> None:
        exchange.empty(200)

    def _loads(self, request: Request, exchange: Exchange) -> None:
        include = parse_qs(request.query.decode("latin-1")).get("include", [None])[0]
        exchange.json(200, encode(loads(self._driver, include)))

    def _metrics(self, _: Request, exchange: Exchange) -> None:
        driver = self._driver
        text = page(driver.engine, driver.metrics, driver.gen_throughput, self._model_name)
        exchange.whole(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    def _models(self, _: Request, exchange: Exchange) -> None:
        exchange.json(200, encode(model_list(self._driver, self._model_name)))

    def _model_info(self, _: Request, exchange: Exchange) -> None:
        exchange.json(200, encode(model_info(self._model_name)))

    def _server_info(self, _: Request, exchange: Exchange) -> None:
        exchange.json(200, encode(server_info(self._driver, self._model_name)))

    def _flush_cache(self, _: Request, exchange: Exchange) -> None:
        if self._driver.engine.has_work:
            exchange.whole(400, b"Flush cache failed.\n", b"text/plain; charset=utf-8")
        else:
            exchange.whole(200, b"Cache flushed.\n", b"text/plain; charset=utf-8")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to serve: its name, its model, its port (0: any free one).

    `switch_above`: with the plugin, which stops speculating above so many running requests.
    """

    name: str
    params: EngineParams
    port: int = 0
    switch_above: int | None = None


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What all engines of a process have in common. None leaves a limit to the engine model.

    `disconnect_s` is how long the engine takes to notice that a client has gone, in wall seconds:
    SGLang looks every few seconds, and an abort is what stops it sooner.
    """

    layout: Layout = Layout.DISJOINT
    clock: float = 1.0
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    model_name: str = MODEL_NAME
    disconnect_s: float = 0.0


class SimServer:
    """Simulated engines on ports of this process, from `async with` to its end."""

    def __init__(self, engines: Sequence[EngineSpec], options: SimOptions | None = None) -> None:
        self._specs = tuple(engines)
        self._options = options or SimOptions()
        self.connections: set[Connection] = set()
        self._stack = AsyncExitStack()
        self.urls: dict[str, str] = {}
        self.drivers: dict[str, Driver] = {}

    async def __aenter__(self) -> Self:
        """Listen; raise OSError when a port is taken."""
        async with AsyncExitStack() as stack:
            stack.callback(self._drop_connections)
            shared = Gpu() if self._options.layout is Layout.SHARED else None
            for at, spec in enumerate(self._specs):
                await self._serve(spec, Gpu() if shared is None else shared, at, stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the ports and every connection at once."""
        await self._stack.aclose()

    async def _serve(self, spec: EngineSpec, gpu: Gpu, at: int, stack: AsyncExitStack) -> None:
        options = self._options
        engine = make_engine(
            spec.params,
            gpu,
            spec.switch_above,
            max_running_requests=options.max_running_requests,
            max_queued_requests=options.max_queued_requests,
        )
        rng = random.Random(f"{options.seed}/{at}")  # noqa: S311 - not for secrets
        driver = Driver(engine, rng, options.clock)
        stack.callback(driver.close)
        routes = Routes(driver, options.model_name, options.disconnect_s)
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(routes, self.connections), options.host, spec.port, backlog=BACKLOG
        )
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        self.urls[spec.name] = f"http://{options.host}:{port}"
        self.drivers[spec.name] = driver

    def _drop_connections(self) -> None:
        for connection in tuple(self.connections):
            connection.transport.abort()


class SpecError(Exception):
    """An engine on the command line that cannot be."""


def parse_spec(text: str) -> EngineSpec:
    """Read NAME=MODEL:PORT, or NAME=MODEL@THRESHOLD:PORT for an engine with the plugin."""
    read = _SPEC.fullmatch(text)
    if read is None or int(read["port"]) >= 2**16:
        raise SpecError(
            f"{text}: an engine is NAME=MODEL:PORT, for example spec=h200-tree-v1:30001, or, with "
            "the plugin, spec=h200-tree-v1@8:30001: not speculating above 8 running requests"
        )
    model, threshold = read["model"], read["threshold"]
    if model not in ENGINES:
        raise SpecError(f"{text}: no engine model {model}; there are {', '.join(ENGINES)}")
    if threshold is not None and ENGINES[model].off is None:
        known = ", ".join(name for name, params in ENGINES.items() if params.off is not None)
        raise SpecError(f"{text}: {model} is not known with the plugin; there are {known}")
    above = None if threshold is None else int(threshold)
    return EngineSpec(read["name"], ENGINES[model], int(read["port"]), above)


def parse_specs(texts: Sequence[str]) -> list[EngineSpec]:
    """Read all engines of a command line."""
    specs = [parse_spec(text) for text in texts]
    if len({spec.name for spec in specs}) < len(specs):
        raise SpecError("two engines have the same name")
    return specs


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < inf:
            raise ValueError
        return value

    read.__name__ = f"positive {kind.__name__}"
    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crossover-loadtest engine",
        description="Serve simulated SGLang engines.",
        epilog="Engine models: " + ", ".join(ENGINES) + ". MODEL@N: with the plugin, OFF above N.",
    )
    parser.add_argument("engines", nargs="+", metavar="NAME=MODEL[@N]:PORT")
    parser.add_argument(
        "--layout",
        choices=[layout.value for layout in Layout],
        default="disjoint",
        help="whether the engines share their GPUs (default: disjoint)",
    )
    parser.add_argument(
        "--clock", type=_positive(float), default=1.0, help="model seconds per second (default: 1)"
    )
    parser.add_argument("--max-running-requests", type=_positive(int), metavar="N")
    parser.add_argument("--max-queued-requests", type=_positive(int), metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the accept lengths (default: 0)")
    parser.add_argument("--host", default="127.0.0.1")
    return parser


async def _run(server: SimServer) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with server:
            for name, url in server.urls.items():
                engine = server.drivers[name].engine
                note = " (interpolated)" if engine.params.interpolated else ""
                plugin = " with the plugin" if isinstance(engine, SwitchingEngine) else ""
                print(f"{name}: {engine.params.name}{plugin}{note} on {url}", flush=True)
            gc.freeze()
            await stop.wait()
    except OSError as error:
        print(f"crossover-loadtest engine: cannot listen: {error}", file=sys.stderr)
        return 2
    slipped = {name: d.lag.slipped_s for name, d in server.drivers.items() if d.lag.slipped_s}
    for name, slipped_s in slipped.items():
        print(
            f"{name}: {slipped_s:.1f} s slower than its model: this machine is too slow",
            file=sys.stderr,
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crossover-loadtest engine`; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        specs = parse_specs(args.engines)
    except SpecError as error:
        print(f"crossover-loadtest engine: {error}", file=sys.stderr)
        return 2
    options = SimOptions(
        layout=Layout(args.layout),
        clock=args.clock,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        seed=args.seed,
        host=args.host,
    )
    import uvloop

    code: int = uvloop.run(_run(SimServer(specs, options)))
    return code
