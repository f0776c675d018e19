"""Heads that two readers could take for different requests, and heads that are anything at all.

What passes reaches the engine as exactly one well-formed request; what is ambiguous is refused, and
nothing that came behind it is read as a request.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from router.dataplane import inlet
from router.settings import Timeouts
from tests.faults.test_server_faults import everything
from tests.integration.rig import Call, Engine, Rig, answer, running

pytestmark = pytest.mark.anyio

# `make test` looks at a few; CROSSOVER_FUZZ_EXAMPLES=20000 looks deeper.
EXAMPLES = int(os.environ.get("CROSSOVER_FUZZ_EXAMPLES", "150"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

POST = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\n"
HIDDEN = b"GET /v1/models?hidden HTTP/1.1\r\nhost: r\r\n\r\n"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class Strict(Engine):
    """Takes nothing but one well-formed request at a time, with its length."""

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Call | None:
        call = await super()._read(reader, writer, number)
        if call is None:
            return None
        assert _TOKEN.fullmatch(call.method)
        assert re.fullmatch(r"/[\x21-\x7e\x80-\xff]*", call.target), call.target
        for name, value in call.headers:
            assert _TOKEN.fullmatch(name), name
            assert _VALUE.fullmatch(value), value
        names = [name.lower() for name, _ in call.headers]
        assert names.count("content-length") <= 1
        assert names.count("host") == 1
        assert "transfer-encoding" not in names
        # Nothing has been sent behind it: no second request, no rest of a body.
        assert not reader._buffer  # type: ignore[attr-defined]
        return call


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(inlet, "HEAD_S", 0.05)
    timeouts = Timeouts(connect_s=5.0, first_byte_s=5.0, idle_s=0.05)
    engines: dict[str, Engine] = {"spec": Strict(answer), "base": Strict(answer)}
    async with running(engines=engines, timeouts=timeouts, idle_client_s=0.05) as made:
        yield made


async def sent(rig: Rig, wire: bytes) -> tuple[bytes, list[Call]]:
    """Send it, wait for the end of the connection, return what came and what engines got."""
    rig.spec.calls.clear()
    reader, writer = await rig.raw(wire)
    answered = await everything(reader)
    writer.transport.abort()
    await rig.settled()
    assert not rig.spec.errors
    return answered, list(rig.spec.calls)


@pytest.mark.parametrize(
    "wire",
    [
        POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 0\r\ncontent-length: 44\r\n\r\n",
        POST + b"content-length: 0\r\ncontent-length: 0\r\n\r\n",
        POST + b"content-length: 0, 44\r\n\r\n",
        POST + b"content-length: +0\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 0x0\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"content-length : 0\r\n\r\n",
        POST + b"content-length\x00: 0\r\n\r\n",
        POST + b"content-length: \x000\r\n\r\n",
        POST + b"x: a\x00b\r\ncontent-length: 0\r\n\r\n",
        POST + b"x: a\r\n content-length: 44\r\ncontent-length: 0\r\n\r\n",
        POST + b" x: a\r\ncontent-length: 0\r\n\r\n",
        POST + b"x: a\ncontent-length: 0\n\n",
        POST + b"x: a\rcontent-length: 44\r\ncontent-length: 0\r\n\r\n",
        POST + b": a\r\ncontent-length: 0\r\n\r\n",
        POST + b"no colon\r\ncontent-length: 0\r\n\r\n",
        POST + b"transfer-encoding: xchunked\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n+0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n 0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n1\na\n0\n\n",
        POST + b"transfer-encoding: chunked\r\n\r\n1;a\nb\r\na\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n",
        b"POST /v1/completions\r\n\r\n",
        b"POST /v1/completions HTTP/1.1 x\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/comp\x00letions HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\ncontent-length: 0\n\n",
        b"PO ST /v1/completions HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)  # fmt: skip
async def test_what_two_readers_could_take_differently_is_refused(rig: Rig, wire: bytes) -> None:
    answered, calls = await sent(rig, wire + HIDDEN)
    assert [call.target for call in calls if "hidden" in call.target] == []
    assert calls == []
    assert answered[:12] == b"HTTP/1.1 400"
    assert answered.count(b"HTTP/1.1 ") == 1


names = st.sampled_from(
    [b"content-length", b"Content-Length", b"transfer-encoding", b"connection", b"expect", b"host",
     b"upgrade", b"x", b"x-request-id", b"te", b"trailer", b"keep-alive", b"x-crossover-session"]
)  # fmt: skip
values = st.one_of(
    st.sampled_from(
        [b"0", b"2", b"44", b"chunked", b"identity", b"gzip, chunked", b"close", b"keep-alive",
         b"100-continue", b"h2c", b"websocket", b"content-length", b"\t2 ", b"0,0"]
    ),
    st.binary(max_size=12),
)  # fmt: skip
separators = st.sampled_from([b": "] * 12 + [b":", b" : ", b":\t", b"\x00:", b"\n:"])
line_ends = st.sampled_from([b"\r\n"] * 20 + [b"\n", b"\r", b"\r\n ", b"\r\r\n"])
bodies = st.one_of(
    st.sampled_from(
        [b"", b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"2;x\r\n{}\r\n0\r\nt: 1\r\n\r\n"]
    ),
    st.binary(max_size=20),
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([b"POST", b"GET", b"HEAD", b"OPTIONS", b"post", b"CONNECT"]))
    path = draw(
        st.sampled_from([b"/v1/completions", b"/v1/models", b"/own", b"*", b"/%2e", b"//x"])
    )
    version = draw(
        st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/1.9", b"http/1.1", b""])
    )
    parts = [method, b" ", path, b" ", version, draw(line_ends)]
    for _ in range(draw(st.integers(0, 4))):
        parts += [draw(names), draw(separators), draw(values), draw(line_ends)]
    return b"".join([*parts, draw(line_ends), draw(bodies)])


@FUZZ
@given(wire=st.one_of(requests(), st.lists(requests(), max_size=3).map(b"".join), st.binary()))
@example(wire=b"")
@example(wire=POST + b"content-length: 2\r\n\r\n{}" + POST + b"content-length: 2\r\n\r\n{}")
async def test_any_bytes_at_all_make_well_formed_requests_or_none(rig: Rig, wire: bytes) -> None:
    answered, calls = await sent(rig, wire)
    # One answer at most for each request line, and not one of them the router's own fault.
    assert len(calls) <= wire.count(b"HTTP/1")
    assert b"HTTP/1.1 500" not in answered
    for line in re.findall(rb"HTTP/1.1 (\d+)", answered):
        assert 100 <= int(line) < 600
