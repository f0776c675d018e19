"""What is relied on in uvicorn: its response behind `send`, and when a chunk may go past it."""

from types import SimpleNamespace

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.dataplane.asgi import Message
from router.dataplane.inlet import cycle_of, takes_chunks

OPEN = {"chunked_encoding": True, "disconnected": False, "response_complete": False}


def response(paused: bool = False, **state: object) -> RequestResponseCycle:
    cycle = object.__new__(RequestResponseCycle)
    vars(cycle).update(OPEN | state, flow=SimpleNamespace(write_paused=paused))
    return cycle


def test_uvicorns_response_is_found_behind_its_send() -> None:
    cycle = response()
    assert cycle_of(cycle.send) is cycle


def test_another_servers_send_has_none() -> None:
    async def send(message: Message) -> None:
        raise AssertionError(message)

    assert cycle_of(send) is None


def test_an_open_chunked_response_takes_chunks() -> None:
    assert takes_chunks(response())


@pytest.mark.parametrize(
    "state",
    [
        {"paused": True},
        {"chunked_encoding": None},
        {"chunked_encoding": False},
        {"disconnected": True},
        {"response_complete": True},
    ],
    ids=str,
)
def test_any_other_response_takes_them_through_send(state: dict[str, object]) -> None:
    assert not takes_chunks(response(**state))
