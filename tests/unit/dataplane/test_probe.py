"""Probes against a real socket: who is admitted, when, and what nonsense cannot do."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from router.core.health import HealthState, ServerHealth
from router.core.types import Role, ServerSpec
from router.dataplane.probe import Prober

pytestmark = pytest.mark.anyio

TICK_S = 0.01
DEADLINE_S = 10.0
NEVER_S = 3600.0

INFO = {
    "served_model_name": "m",
    "context_length": None,
    "dtype": "bfloat16",
    "chat_template": None,
    "max_running_requests": None,
    "speculative_algorithm": "EAGLE3",
    "api_key": "hunter2",
    "admin_api_key": "hunter3",
    "version": "0.5.12.post1",
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
}
MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}


class Engine:
    """Answers as SGLang does, or with the bytes that `answers` has for a path."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.info = dict(INFO)
        self.models = dict(MODELS)
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.asked.append(path)
            writer.write(self.answers[path] if path in self.answers else self._answer(path))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str) -> bytes:
        bodies = {"/health": "", "/server_info": self.info, "/v1/models": self.models}
        if path not in bodies:
            return answer(404, b"{}")
        return answer(200, json.dumps(bodies[path]).encode())


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Rig:
    """One or two engines and a prober that looks at them often."""

    def __init__(self, interval_s: float, roles: tuple[Role, ...]) -> None:
        self.engines = [Engine() for _ in roles]
        self.roles = roles
        self.interval_s = interval_s
        self.health = {role.value: ServerHealth() for role in roles}
        self.prober: Prober | None = None

    def begin(self) -> Prober:
        servers = [
            ServerSpec(role.value, role, f"http://127.0.0.1:{engine.port}")
            for role, engine in zip(self.roles, self.engines, strict=True)
        ]
        self.prober = Prober(
            servers, self.health, interval_s=self.interval_s, clock=time.monotonic, tick_s=TICK_S
        )
        self.prober.start()
        return self.prober


@asynccontextmanager
async def rig(interval_s: float = NEVER_S, *roles: Role) -> AsyncIterator[Rig]:
    made = Rig(interval_s, roles or (Role.SPEC,))
    for engine in made.engines:
        await engine.start()
    try:
        yield made
    finally:
        if made.prober is not None:
            await made.prober.aclose()
        for engine in made.engines:
            await engine.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  (what is polled has no event)
            await asyncio.sleep(TICK_S)


async def test_a_server_is_admitted_by_its_first_good_probe_and_tells_its_facts() -> None:
    async with rig() as r:
        health = r.health["spec"]
        r.engines[0].answers["/health"] = answer(503, b"")
        prober = r.begin()
        await until(lambda: len(r.engines[0].asked) >= 3)
        assert not health.up
        assert health.last_error == "GET /health: HTTP 503"
        del r.engines[0].answers["/health"]
        await until(lambda: prober.facts("spec"))
        assert health.up
        assert health.context_length == 4096
        facts = prober.facts("spec")
        assert facts is not None
        assert (facts.served_model_name, facts.max_running_requests) == ("m", 48)
        assert "hunter" not in repr(facts)


async def test_a_server_that_is_not_there_yet_is_admitted_as_it_comes_up() -> None:
    async with rig() as r:
        await r.engines[0].stop()
        r.begin()
        await until(lambda: r.health["spec"].transport_errors >= 3)
        assert r.health["spec"].state is HealthState.UNKNOWN
        await r.engines[0].start()
        await until(lambda: r.health["spec"].up)


async def test_a_server_that_dies_is_noticed_though_nobody_sends_it_work() -> None:
    async with rig(TICK_S) as r:
        r.begin()
        await until(lambda: r.health["spec"].up)
        await r.engines[0].stop()
        await until(lambda: r.health["spec"].state is HealthState.UNREACHABLE)
        await r.engines[0].start()
        await until(lambda: r.health["spec"].up)


async def test_a_server_that_returns_is_asked_for_its_facts_again() -> None:
    async with rig() as r:
        prober = r.begin()
        await until(lambda: prober.facts("spec"))
        r.engines[0].models = {"data": [{"id": "m", "max_model_len": 8192}]}
        for _ in range(2):
            r.health["spec"].transport_error(time.monotonic(), "refused")
        await until(lambda: r.health["spec"].context_length == 8192)


async def test_a_server_from_which_tokens_flow_is_not_probed() -> None:
    async with rig(TICK_S, Role.SPEC, Role.BASE) as r:
        prober = r.begin()
        await until(lambda: prober.facts("spec") and prober.facts("base"))
        r.health["spec"].token(time.monotonic() + NEVER_S)
        flowing, quiet = r.engines
        # One probe may have been under way; after that the quiet server alone is asked.
        flowing_asked, quiet_asked = len(flowing.asked), len(quiet.asked)
        await until(lambda: len(quiet.asked) >= quiet_asked + 5)
        assert len(flowing.asked) <= flowing_asked + 1


GARBAGE = {
    "nothing": b"",
    "no http": b"\x00\xff\x16\x03 hello\r\n\r\n",
    "half a head": b"HTTP/1.1 200",
    "cut body": b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nabc",
    "not json": answer(200, b"<html>"),
    "not an object": answer(200, b"[1]"),
    "not utf-8": answer(200, b"\xff\xfe{}"),
    "deep": answer(200, b"[" * 100_000),
    "bad gzip": b"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "too large": answer(200, b" " * (5 * 2**20)),
    "redirect": b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "wrong types": answer(
        200,
        json.dumps(
            {"data": [{"id": 7, "max_model_len": "9"}], "dtype": [], "version": "\n",
             "internal_states": [{"effective_max_running_requests_per_dp": -1}],
             "max_running_requests": True, "speculative_algorithm": {}}
        ).encode(),
    ),
    "empty list": answer(200, b'{"data": [], "internal_states": []}'),
    "lists of nothing": answer(200, b'{"data": [null], "internal_states": [null]}'),
}  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_no_answer_ends_the_probing_or_becomes_a_fact(garbage: str) -> None:
    async with rig(TICK_S) as r:
        engine = r.engines[0]
        engine.answers["/server_info"] = engine.answers["/v1/models"] = GARBAGE[garbage]
        prober = r.begin()
        await until(lambda: engine.asked.count("/health") >= 3)
        assert r.health["spec"].up
        assert r.health["spec"].context_length is None
        engine.answers["/health"] = GARBAGE["no http"]
        await until(lambda: not r.health["spec"].up)
        engine.answers.clear()
        await until(lambda: r.health["spec"].context_length == 4096)
        assert prober.facts("spec")


async def test_a_server_that_demands_a_key_for_its_settings_is_told_of() -> None:
    async with rig() as r:
        r.engines[0].answers["/server_info"] = answer(401, b"{}")
        prober = r.begin()
        await until(lambda: prober.parity_warnings)
        assert (
            "does not tell its settings (GET /server_info: HTTP 401)" in prober.parity_warnings[0]
        )
        assert r.health["spec"].up


async def test_an_older_server_is_asked_by_the_older_name() -> None:
    async with rig() as r:
        engine = r.engines[0]
        engine.answers["/get_server_info"] = answer(200, json.dumps(INFO).encode())
        engine.answers["/server_info"] = answer(404, b"{}")
        prober = r.begin()
        await until(lambda: prober.facts("spec"))
        assert engine.asked.count("/get_server_info") == 1


async def test_differences_are_warned_of_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(NEVER_S, Role.SPEC, Role.BASE) as r:
        r.engines[1].info["speculative_algorithm"] = None
        r.engines[1].info["dtype"] = "float16"
        with caplog.at_level(logging.WARNING, "crossover.probe"):
            prober = r.begin()
            await until(lambda: prober.parity_warnings)
            asked = len(r.engines[1].asked)
            for _ in range(2):
                r.health["base"].transport_error(time.monotonic(), "refused")
            await until(lambda: len(r.engines[1].asked) >= asked + 3)
            await until(lambda: r.health["base"].up)
        assert len(prober.parity_warnings) == 1
        assert "dtype differs: spec has bfloat16, base has float16" in prober.parity_warnings[0]
        told = [each for each in caplog.records if "dtype" in each.getMessage()]
        assert len(told) == 1


@pytest.mark.parametrize(
    ("role", "algorithm", "expected"),
    [
        (Role.SPEC, None, "server spec has role spec, but does not speculate"),
        (Role.BASE, "EAGLE", "server base has role base, but speculates"),
    ],
)
async def test_swapped_urls_are_warned_of(role: Role, algorithm: str | None, expected: str) -> None:
    async with rig(NEVER_S, role) as r:
        r.engines[0].info["speculative_algorithm"] = algorithm
        prober = r.begin()
        await until(lambda: prober.parity_warnings)
        assert expected in prober.parity_warnings[0]
