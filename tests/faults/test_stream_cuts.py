"""However a stream is cut into reads, the client gets its bytes and the router sees the same."""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.health import ServerHealth
from router.core.tokens import TokenModel
from router.dataplane.cycle import Cycle
from router.dataplane.exchange import Context, Exchange
from router.dataplane.paths import Inference, classify
from router.dataplane.upstream import Connection, ConnectionBroken
from tests.faults.test_server_faults import unchunked
from tests.faults.test_smuggling import FUZZ
from tests.integration.rig import CHAT, DONE, event

HEADERS = [(b"content-type", b"text/event-stream")]
ERROR = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
FULL = b'data: {"error": {"message": "full", "code": 503}}\n\n'
NAMED_ERROR = b'event: error\ndata: {"type": "error", "message": "no"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += data


@dataclass
class Client:
    """The client's connection, and the engine's: both only take."""

    transport: Wire = field(default_factory=Wire)
    full: bool = False

    def answered(self, cycle: Cycle) -> None:
        pass

    def finish(self, *, drain: bool) -> None:
        pass

    def reset(self) -> None:
        pass

    def abort(self) -> None:
        pass


@dataclass(frozen=True)
class Seen:
    """All that must not depend on the cuts."""

    outcome: str
    body: bytes
    tokens: float
    first_tokens: int
    broken: bool
    last: bytes
    refused: bool


def relayed(path: str, reads: list[bytes], *, breaks: bool = False) -> Seen:
    """Relay a stream that comes in these reads."""
    route = classify("POST", path)
    assert isinstance(route, Inference)
    client, firsts = Client(), list[float]()
    counter = TokenModel().counter(1)
    context = Context(
        route, "spec", firsts.append, ServerHealth(), counter, lambda _: None, lambda: 1.0, [],
        lambda: None, again=False,
    )  # fmt: skip
    cycle = Cycle(client, "POST", path, path.encode(), [])
    cycle.received = True
    exchange = Exchange(context, cycle, cast("Connection", client))
    exchange.on_head(200, HEADERS)
    for data in reads:
        if exchange.reply is None:
            exchange.on_body(data)
    if exchange.reply is None:
        if breaks:
            exchange.on_fail(ConnectionBroken("broke"))
        else:
            exchange.on_end()
    body = bytes(client.transport.data).partition(b"\r\n\r\n")[2]
    counter.finish()
    return Seen(
        exchange.outcome, unchunked(body), counter.tokens, len(firsts), exchange.broken,
        exchange.last, exchange.refused,
    )  # fmt: skip


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % len(stream) for place in places} | {0, len(stream)})
    return [stream[a:b] for a, b in pairwise(edges)]


words = st.text(max_size=12).map(event)
usage = st.just(
    b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 7}}).encode() + b"\n\n"
)
rare = st.sampled_from([ERROR, NAMED_ERROR, b": ping\n\n", DELTA])
events = st.lists(st.one_of(words, words, words, usage, rare), min_size=1, max_size=8)
ends = st.sampled_from([DONE, b"", DONE + b": bye\n\n", b"data: [DO"])
cuts = st.lists(st.integers(0, 2**16), max_size=30)


@FUZZ
@given(parts=events, end=ends, places=cuts, breaks=st.booleans())
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_cuts_change_nothing(
    path: str, parts: list[bytes], end: bytes, places: list[int], breaks: bool
) -> None:
    stream = b"".join(parts) + end
    whole = relayed(path, [stream], breaks=breaks)
    pieces = relayed(path, cut(stream, places), breaks=breaks)
    single = relayed(path, [stream[at : at + 1] for at in range(len(stream))], breaks=breaks)
    assert pieces == whole
    assert single == whole
    if not whole.refused and whole.body:
        assert whole.body == stream


@pytest.mark.parametrize("error", [ERROR, NAMED_ERROR], ids=["error", "event: error"])
def test_an_error_event_is_seen_wherever_it_is_cut(error: bytes) -> None:
    stream = event("a") + error + DONE
    for at in range(1, len(stream)):
        assert relayed(CHAT, [stream[:at], stream[at:]]).outcome == "upstream_error"


def test_a_refusal_is_seen_wherever_it_is_cut() -> None:
    stream = FULL + DONE
    for at in range(1, len(stream)):
        seen = relayed(CHAT, [stream[:at], stream[at:]])
        assert (seen.outcome, seen.refused, seen.body) == ("upstream_overload", True, b"")


def test_the_end_is_seen_wherever_it_is_cut() -> None:
    stream = event("a") + event("b") + DONE
    for at in range(1, len(stream)):
        assert relayed(CHAT, [stream[:at], stream[at:]], breaks=True).outcome == "ok"
        whole = at >= len(stream.rstrip())
        assert relayed(CHAT, [stream[:at]]).outcome == ("ok" if whole else "truncated")


def test_the_first_token_of_a_response_is_seen_wherever_it_is_cut() -> None:
    stream = b"event: response.created\ndata: {}\n\n" + DELTA
    for at in range(1, len(stream)):
        assert relayed("/v1/responses", [stream[:at], stream[at:]]).first_tokens == 1
