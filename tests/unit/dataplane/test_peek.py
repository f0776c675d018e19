import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.types import RequestShape
from router.dataplane.paths import Inference, classify
from router.dataplane.peek import SEQUENCES_MAX, Peek, peek, splice


def look(path: str, body: Any) -> Peek:
    route = classify("POST", path)
    assert isinstance(route, Inference)
    return peek(body if isinstance(body, bytes) else json.dumps(body).encode(), route)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "sequences", "abortable"),
    [
        (CHAT, chat("hi"), 1, True),
        (CHAT, chat("hi", n=3), 3, False),
        (CHAT, chat("hi", n=1), 1, True),
        (CHAT, chat("hi", rid="x"), 1, False),
        (CHAT, chat("hi", rid=None), 1, False),
        (CHAT, chat("hi", n=None), 1, True),
        (CHAT, chat("hi", n="3"), 1, False),
        (CHAT, chat("hi", n=True), 1, True),
        (CHAT, chat("hi", n=-4), 1, False),
        (CHAT, chat("hi", n=10**9), SEQUENCES_MAX, False),
        ("/v1/completions", {"prompt": "hi"}, 1, True),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4, False),
        ("/v1/completions", {"prompt": ["a"]}, 1, False),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1, True),
        ("/v1/completions", {"prompt": [[1], [2], [3]]}, 3, False),
        ("/v1/completions", {"prompt": []}, 1, True),
        ("/v1/completions", {}, 1, True),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, 2, False),
        ("/generate", {"text": ["a", "b"]}, 2, False),
        ("/generate", {"input_ids": [1, 2]}, 1, True),
        ("/generate", {"input_ids": [[1, 2], [3]]}, 2, False),
        ("/generate", {"text": "a", "sampling_params": [{}]}, 1, False),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}]}, 1, True),
        ("/v1/responses", {"input": "a", "background": True}, 1, False),
        ("/v1/responses", {"input": "a", "request_id": "x"}, 1, False),
        ("/v1/responses", {"input": "a", "rid": "x"}, 1, True),
        ("/v1/messages", {"messages": []}, 1, False),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2, False),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, 2, False),
        ("/tokenize", {"prompt": ["a", "b"]}, 0, False),
    ],
)
def test_sequences_and_abortability(
    path: str, body: dict[str, Any], sequences: int, abortable: bool
) -> None:
    seen = look(path, body)
    assert (seen.shape.sequences, seen.abortable) == (sequences, abortable)


@pytest.mark.parametrize(
    ("path", "body", "tokens", "longest"),
    [
        (CHAT, chat("a" * 400), 100, None),
        (CHAT, chat("漢" * 400), 300, None),
        ("/v1/completions", {"prompt": list(range(77))}, 77, None),
        ("/v1/completions", {"prompt": [[1, 2], [1, 2, 3]]}, 5, 3),
        ("/v1/completions", {"prompt": ["a" * 400, "a" * 40]}, 110, 100),
        ("/v1/messages", {"system": "a" * 200, "messages": [{"content": "a" * 200}]}, 100, None),
    ],
)
def test_the_prompts_size_is_estimated(
    path: str, body: dict[str, Any], tokens: int, longest: int | None
) -> None:
    shape = look(path, body).shape
    assert shape.prompt_tokens == pytest.approx(tokens, abs=5)
    assert shape.longest_prompt_tokens == (
        None if longest is None else pytest.approx(longest, abs=2)
    )


def test_a_picture_is_not_measured_in_bytes() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}]
    assert look(CHAT, chat("", messages=[{"content": parts}])).shape.prompt_tokens < 20


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (CHAT, chat("a", max_tokens=5), 5),
        (CHAT, chat("a", max_tokens=5, max_completion_tokens=7), 7),
        (CHAT, chat("a", max_tokens="5"), None),
        (CHAT, chat("a"), None),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, 9),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 11}}, 11),
    ],
)
def test_the_answers_limit_is_found(path: str, body: dict[str, Any], limit: int | None) -> None:
    assert look(path, body).shape.max_tokens == limit


@pytest.mark.parametrize(
    ("stream", "seen"), [(True, True), (False, False), (None, False), (1, False)]
)
def test_stream_is_what_json_calls_true(stream: Any, seen: bool) -> None:
    assert look(CHAT, chat("a", stream=stream)).stream is seen


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"a": 1} x', b"\xff", b"--boundary"]
)
def test_what_is_no_object_is_one_sequence_and_not_touched(body: bytes) -> None:
    assert look(CHAT, body) == Peek(RequestShape(prompt_tokens=len(body) // 4))


@pytest.mark.parametrize("value", ["[]", '{"a":1}', '"",""'])
def test_a_body_of_too_many_values_is_left_unread(value: str) -> None:
    def body(count: int) -> bytes:
        return b'{"messages":[],"junk":[%s]}' % ",".join([value] * count).encode()

    assert look(CHAT, body(60_000)).abortable
    many = body(600_000)
    assert look(CHAT, many) == Peek(RequestShape(prompt_tokens=len(many) // 4))


def test_deep_nesting_is_survived() -> None:
    body = b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"
    assert look(CHAT, body).shape.sequences == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(), json_values, max_size=4), st.sampled_from(["", " ", "\n\t ", "\r\n"])
)
def test_splicing_adds_one_key_and_changes_no_other_byte(value: dict[str, Any], space: str) -> None:
    value.pop("rid", None)
    text = json.dumps(value)
    body = (space + "{" + space + text[1:-1] + space + "}" + space).encode()
    spliced = splice(body, "rid", "f00")
    assert json.loads(spliced) == {"rid": "f00", **value}
    head, _, tail = spliced.partition(b'"rid":"f00"')
    assert head + tail.removeprefix(b",") == body


@given(json_values)
def test_no_json_upsets_the_peek(value: Any) -> None:
    for path in (CHAT, "/v1/completions", "/generate", "/v1/responses", "/v1/rerank"):
        for body in (value, {"messages": value, "prompt": value, "n": value, "text": value}):
            shape = look(path, body).shape
            assert 1 <= shape.sequences <= SEQUENCES_MAX or shape.sequences == 0
            assert shape.prompt_tokens >= 0


def session(body: dict[str, Any], header: bytes | None = None, path: str = CHAT) -> int | None:
    route = classify("POST", path)
    assert isinstance(route, Inference)
    return peek(json.dumps(body).encode(), route, header).shape.session


def test_the_requests_of_a_conversation_share_a_session() -> None:
    system = {"role": "system", "content": "be brief"}
    first = [system, {"role": "user", "content": "hi"}]
    later = [*first, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "why"}]
    assert session({"messages": first}) == session({"messages": later}) is not None
    assert session({"messages": first}) != session({"messages": first[1:]})
    assert session({"messages": first}) != session(chat("ho"))


def test_a_conversation_that_opens_with_parts_has_a_session() -> None:
    def opening(text: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        return chat("") | {
            "messages": [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
        }

    assert session(opening("what is this")) == session(opening("what is this"))
    assert session(opening("what is this")) != session(opening("where is this"))


def test_a_client_may_name_its_session() -> None:
    assert session(chat("a"), b"s-1") == session(chat("b"), b"s-1") is not None
    assert session(chat("a"), b"s-1") != session(chat("a"), b"s-2")
    assert session({"prompt": "a"}, b"s-1", "/v1/completions") == session(chat("b"), b"s-1")


@pytest.mark.parametrize("messages", [[], "hi", [1], [{}], [{"role": "user"}], None])
def test_what_is_no_conversation_has_no_session(messages: object) -> None:
    assert session({"messages": messages}) is None


def test_a_lone_prompt_has_no_session() -> None:
    assert session({"prompt": "a"}, path="/v1/completions") is None


@pytest.mark.parametrize(
    ("path", "body", "continues"),
    [
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/responses", {"input": "a", "previous_response_id": None}, None),
        ("/v1/responses", {"input": "a", "previous_response_id": 3}, None),
        ("/v1/responses", {"input": "a"}, None),
        (CHAT, chat("hi", previous_response_id="resp_1"), None),
    ],
)
def test_the_response_that_a_request_goes_on_from_is_seen(
    path: str, body: Any, continues: str | None
) -> None:
    assert look(path, body).continues == continues
