"""What the inlet leans on in uvicorn, without saying so in its types: fails when that moves."""

import asyncio
import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

pytestmark = pytest.mark.anyio

ATTRIBUTES = {
    "app", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser", "pipeline",
    "timeout_keep_alive", "timeout_keep_alive_task", "transport",
}  # fmt: skip
METHODS = {
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
    "connection_lost": ["exc"],
    "on_body": ["body"],
    "on_headers_complete": [],
    "on_message_begin": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "pause_writing": [],
    "resume_writing": [],
    "send_400_response": ["msg"],
    "timeout_keep_alive_handler": [],
}


class Transport(asyncio.Transport):
    closed = False
    paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("not to be run")


class Started(HttpToolsProtocol):
    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.started = cycle


async def protocol() -> Started:
    config = uvicorn.Config(app, log_config=None)
    made = Started(config, ServerState(), {}, asyncio.get_running_loop())
    made.connection_made(Transport())
    return made


def cycle(complete: bool) -> Any:
    """No more of a cycle than ours has."""
    return SimpleNamespace(response_complete=complete, keep_alive=True)


async def test_what_the_inlet_reads_and_sets_is_there() -> None:
    assert set(vars(await protocol())) >= ATTRIBUTES
    assert isinstance((await protocol()).pipeline, deque)


@pytest.mark.parametrize("name", METHODS)
def test_what_the_inlet_overrides_or_calls_takes_what_it_took(name: str) -> None:
    parameters = list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters)
    assert parameters[1:] == METHODS[name]


async def test_a_shutdown_closes_a_connection_between_requests() -> None:
    for idle in (None, cycle(complete=True)):
        made = await protocol()
        made.cycle = idle
        made.shutdown()
        assert made.transport.is_closing()


async def test_a_shutdown_lets_a_response_end_and_asks_it_to_close() -> None:
    made = await protocol()
    made.cycle = cycle(complete=False)
    made.shutdown()
    assert not made.transport.is_closing()
    assert made.cycle.keep_alive is False


async def test_a_response_that_is_complete_starts_the_next_or_the_keep_alive_timer() -> None:
    made = await protocol()
    made.flow.pause_reading()
    first, second = cycle(complete=False), cycle(complete=False)
    made.pipeline.extendleft([(first, app), (second, app)])
    made.on_response_complete()
    assert made.started is first
    assert not made.transport.paused  # type: ignore[attr-defined]
    made.on_response_complete()
    assert made.started is second
    assert made.timeout_keep_alive_task is None
    made.on_response_complete()
    assert made.timeout_keep_alive_task is not None
    made.timeout_keep_alive_task.cancel()


async def test_asgi_behind_a_cycle_of_ours_waits_for_it() -> None:
    made = await protocol()
    made.cycle = cycle(complete=False)
    made.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert len(made.pipeline) == 1
    assert made.transport.paused  # type: ignore[attr-defined]
