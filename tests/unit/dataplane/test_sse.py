import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dataplane.sse import (
    Refusal,
    closing,
    ends_with,
    event_data,
    first_event,
    is_event_stream,
    refusal,
    reports_error,
    tail,
)


@pytest.mark.parametrize(
    ("buffer", "event"),
    [
        (b"", None),
        (b"data: a", None),
        (b"data: a\n", None),
        (b"data: a\n\n", b"data: a"),
        (b"data: a\n\ndata: b\n\n", b"data: a"),
        (b"data: a\r\n\r\n", b"data: a"),
        (b"data: a\r\r", b"data: a"),
        (b"event: x\ndata: a\n\n", b"event: x\ndata: a"),
        (b": ping\n\n", None),
        (b": ping\n\ndata: a\n\n", b"data: a"),
        (b"event: x\n\n: data: b\n\n", None),
        (b"\n\n\n\ndata: a\n\n", b"data: a"),
    ],
)
def test_the_first_event_is_the_first_complete_block_with_data(
    buffer: bytes, event: bytes | None
) -> None:
    found = first_event(buffer)
    assert found == event or (found is not None and event is not None and found.strip() == event)


def test_the_data_of_an_event_is_joined_from_its_lines() -> None:
    assert event_data(b"event: x\ndata: {\ndata:1}\nid: 3") == b"{\n1}"


def streamed(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_error_with_a_status_is_a_refusal_with_its_own_body(status: int) -> None:
    event = streamed({"error": {"message": "full", "code": status}})
    assert refusal(event) == Refusal(status, event.removeprefix(b"data: "))


def test_an_abort_with_a_status_is_a_refusal() -> None:
    reason = {"type": "abort", "message": "full", "status_code": 503, "err_type": "Unavailable"}
    found = refusal(streamed({"text": "", "meta_info": {"finish_reason": reason}}))
    assert found is not None
    assert found.status == 503
    assert json.loads(found.body())["error"] == {
        "message": "full", "type": "Unavailable", "param": None, "code": 503,
    }  # fmt: skip
    assert (b"retry-after", b"1") in found.headers()


@pytest.mark.parametrize(
    "value",
    [
        {"error": {"message": "x"}},
        {"error": {"code": 200}},
        {"error": {"code": "503"}},
        {"error": {"code": 1503}},
        {"error": "503"},
        {"choices": [{"delta": {"content": '"error"'}}]},
        {"meta_info": {"finish_reason": {"type": "abort", "status_code": None}}},
        {"meta_info": {"finish_reason": {"type": "length", "status_code": 503}}, "x": "abort"},
        ["error"],
    ],
)
def test_anything_else_is_no_refusal(value: object) -> None:
    assert refusal(streamed(value)) is None


def test_a_broken_event_is_no_refusal() -> None:
    assert refusal(b'data: {"error": {"code": 503') is None


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"id": 1}\n\ndata: {"error": {}}\n\n', True),
        (b"event: error\ndata: {}\n\n", True),
        (b'data: {"id": "x", "content": "data: {\\"error\\""}\n\n', False),
        (b'data: {"content": "event: error"}\n\n', False),
    ],
)
def test_an_error_event_is_told_from_a_model_that_talks_of_one(data: bytes, found: bool) -> None:
    assert reports_error(b"", data) is found


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"id": 1}\n\ndata: {"error": {}}\n\n',
        b'data: {"id": 1, "content": "' + 64 * b"." + b'"}\n\nevent: error\ndata: {}\n\n',
        b'data:{"error": {}}\r\n\r\n',
    ],
)
def test_an_error_event_is_found_wherever_the_stream_is_cut(stream: bytes) -> None:
    for at in range(1, len(stream)):
        before, data = stream[:at], stream[at:]
        assert reports_error(b"", before) or reports_error(tail(b"", before), data)


def test_a_cut_in_a_models_words_makes_no_error_event() -> None:
    stream = b'data: {"content": "' + b"x" * 80 + b'event: error data: {\\"error\\""}\n\n'
    for at in range(1, len(stream)):
        before, data = stream[:at], stream[at:]
        assert not reports_error(b"", before)
        assert not reports_error(tail(b"", before), data)


@pytest.mark.parametrize(
    ("stream", "rest"),
    [
        (b"", b""),
        (b"data: a\n\n", b""),
        (b"data: a\r\n\r\n", b""),
        (b"data: a\n", b"\n"),
        (b"data: a\r\n", b"\n"),
        (b"data: a", b"\n\n"),
    ],
)
def test_an_open_event_is_closed(stream: bytes, rest: bytes) -> None:
    assert closing(stream) == rest


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=20))
def test_the_tail_does_not_depend_on_how_the_stream_is_cut(stream: bytes, cuts: list[int]) -> None:
    stream += b"\ndata: [DONE]\n\n"  # behind a lone colon it would be a comment
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    end = b""
    for a, b in pairwise(edges):
        end = tail(end, stream[a:b])
    assert stream.endswith(end)
    assert ends_with(end, b"[DONE]")
    assert closing(end) == b""


def test_a_model_that_mentions_the_end_marker_has_not_ended() -> None:
    assert not ends_with(b'data: {"content": "data: [DONE]"}\n\n', b"[DONE]")


@pytest.mark.parametrize(
    ("content_type", "yes"),
    [
        (b"text/event-stream", True),
        (b"text/event-stream; charset=utf-8", True),
        (b"Text/Event-Stream", True),
        (b"application/json", False),
        (b"", False),
    ],
)
def test_event_streams_are_known_by_their_type(content_type: bytes, yes: bool) -> None:
    assert is_event_stream(content_type) is yes
