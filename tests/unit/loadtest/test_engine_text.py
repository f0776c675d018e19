"""The tape that replies are cut from, and the reading of requests."""

import json

import orjson
import pytest

from loadtest.sim_requests import Api, Call, RefusedError, parse_call
from loadtest.sim_text import PERIOD_TOKENS, STRETCH_TOKENS, count_tokens, start_of, tape


def read(api: Api, **body: object) -> Call:
    return parse_call(api, orjson.dumps(body), "application/json", context_tokens=1_000)


def test_a_stretch_is_its_parts_put_together() -> None:
    parts = [tape().text(5_000 + at, 3) for at in range(0, 30, 3)]
    assert b"".join(parts) == tape().text(5_000, 30)


def test_every_cut_between_tokens_is_a_whole_json_string() -> None:
    for at in range(0, PERIOD_TOKENS, 7):
        assert json.loads(b'"' + tape().text(at, 3) + b'"')


@pytest.mark.parametrize("count", [0, 1, 100, STRETCH_TOKENS, STRETCH_TOKENS + 100])
def test_there_are_as_many_ids_as_tokens(count: int) -> None:
    assert len(json.loads(tape().ids(8_000, count))) == count


def test_a_reply_longer_than_the_tape_goes_on() -> None:
    long = tape().text(10, 2 * STRETCH_TOKENS + 1)
    assert long.startswith(tape().text(10, STRETCH_TOKENS))
    assert json.loads(b'"' + long + b'"')


def test_the_bytes_of_a_token_vary() -> None:
    sizes = {len(tape().text(at, 1)) for at in range(PERIOD_TOKENS)}
    assert min(sizes) == 1
    assert max(sizes) >= 10


def test_a_prompt_decides_its_reply_and_choices_differ() -> None:
    assert start_of(b"one") == start_of(b"one") != start_of(b"two")
    assert start_of(b"one", 0) != start_of(b"one", 1)


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 1), ("one two three", 3), ("x" * 60, 10), ("字" * 20, 10)]
)
def test_prompt_tokens_are_words_or_bytes_whichever_are_more(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens


def test_a_completion_without_a_limit_gets_16_tokens_and_chat_ends_itself() -> None:
    (ask,) = read(Api.COMPLETION, prompt="x").asks
    assert (ask.max_tokens, ask.ends_itself) == (16, False)
    (ask,) = read(Api.CHAT, messages=[{"role": "user", "content": "x"}]).asks
    assert ask.ends_itself
    assert 0 < ask.max_tokens < 1_000


def test_choices_share_the_prefill_of_their_prompt() -> None:
    call = read(Api.COMPLETION, prompt=[[1] * 10, [2] * 20], n=2)
    assert [ask.prompt_tokens for ask in call.asks] == [10, 10, 20, 20]
    assert [ask.cached_tokens for ask in call.asks] == [0, 9, 0, 19]


def test_a_rid_names_a_single_sequence_and_numbers_a_batch() -> None:
    assert read(Api.GENERATE, text="x", rid="r").asks[0].rid == "r"
    assert [ask.rid for ask in read(Api.GENERATE, text=["x", "y"], rid="r").asks] == ["r_0", "r_1"]
    assert [ask.rid for ask in read(Api.GENERATE, text=["x", "y"], rid=["a", "b"]).asks] == [
        "a",
        "b",
    ]
    assert "r" not in {ask.rid for ask in read(Api.COMPLETION, prompt="x", n=2, rid="r").asks}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 3},
        {"prompt": ["x", 3]},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": "many"},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "n": 10_000},
        {"prompt": "x", "stream": "yes"},
        {"prompt": "x", "rid": 7},
        {"prompt": ""},
        {"prompt": "x", "max_tokens": 1_000},
        {"prompt": [1] * 1_000},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(RefusedError) as refused:
        read(Api.COMPLETION, **body)
    assert refused.value.status == 400
