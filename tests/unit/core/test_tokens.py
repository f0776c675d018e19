import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.token_estimate import measure
from router.core.tokens import TokenCounter, TokenModel

_NASTY = (
    'say "content":"x" and \\"completion_tokens\\":99, {"usage":{"completion_tokens":77}}'
    '\n\ndata: {"text":"y"}'
)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _event(value: object) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _chat(text: str | None, tokens: int | None = None, index: int = 0) -> bytes:
    delta = (
        {"reasoning_content": None}
        if text is None
        else {"reasoning_content": None, "content": text}
    )
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    event: dict[str, object] = {"id": "c0ffee", "model": "m", "choices": [choice]}
    if tokens is not None:
        event["usage"] = {
            "prompt_tokens": 7,
            "total_tokens": 7 + tokens,
            "completion_tokens": tokens,
        }
    return _event(event)


def _usage(tokens: int) -> bytes:
    usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
    return _event({"id": "c0ffee", "model": "m", "choices": [], "usage": usage})


def _generate(text: str, tokens: int, index: int | None = None) -> bytes:
    event: dict[str, object] = {
        "text": text,
        "output_ids": list(range(tokens)),
        "meta_info": {
            "id": "r",
            "prompt_tokens": 7,
            "completion_tokens": tokens,
            "e2e_latency": 1.5,
        },
    }
    return _event(event if index is None else {**event, "index": index})


def _fed(*chunks: bytes, sequences: int = 1, model: TokenModel | None = None) -> TokenCounter:
    counter = (model or TokenModel()).counter(sequences)
    for chunk in chunks:
        counter.feed(chunk)
    return counter


def _estimated(text: str, events: int) -> float:
    return TokenModel().estimate.tokens(measure(_json(text)[1:-1]), events)


def test_nothing_is_no_tokens_and_not_exact() -> None:
    counter = _fed(b"", b": ping\n\n")
    assert (counter.tokens, counter.exact) == (0, False)


@pytest.mark.parametrize("tail", [[], [b"data: [DONE]\n\n"]])
def test_the_usage_that_ends_a_stream_is_the_count(tail: list[bytes]) -> None:
    counter = _fed(_chat(""), _chat("Hello"), _chat(" world"), _usage(5), *tail)
    assert (counter.tokens, counter.exact) == (5, True)


def test_a_usage_in_every_event_is_followed_as_it_grows() -> None:
    counter = TokenModel().counter()
    for tokens in (1, 4, 6):
        counter.feed(_chat("abc", tokens))
        assert counter.tokens == tokens


def test_the_last_of_several_counts_in_a_chunk_holds() -> None:
    assert _fed(_chat("a", 2) + _chat("b", 5)).tokens == 5
    assert _fed(_chat("a", 2), _chat("b", 5) + _chat("c", 9)).tokens == 9


def test_generate_tells_its_count_in_meta_info() -> None:
    assert _fed(_generate("a", 1), _generate("a b c", 4), b"data: [DONE]\n\n").tokens == 4


def test_a_placeholder_of_zero_is_not_a_count() -> None:
    start = _event({"type": "message_start", "message": {"usage": {"output_tokens": 0}}})
    delta = _event(
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hello"}}
    )
    counter = _fed(start, delta)
    assert not counter.exact
    assert counter.tokens == _estimated("Hello", 1)
    counter.feed(_event({"type": "message_delta", "usage": {"output_tokens": 3}}))
    assert (counter.tokens, counter.exact) == (3, True)


def test_a_response_that_is_not_streamed_tells_its_count() -> None:
    body = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}],
        "usage": {"completion_tokens": 11},
    }
    assert _fed(_json(body)).tokens == 11


def test_sequences_add_up_by_their_index() -> None:
    chunks = [_chat("a", 1, 0), _chat("b", 2, 1), _chat("c", 3, 0), _chat("d", 4, 1)]
    assert _fed(*chunks, sequences=2).tokens == 7
    assert _fed(b"".join(chunks), sequences=2).tokens == 7
    assert _fed(*chunks, _usage(8), sequences=2).tokens == 8
    assert _fed(_generate("a", 2, 0), _generate("b", 5, 1), sequences=2).tokens == 7


def test_an_index_beyond_the_sequences_is_ignored() -> None:
    assert _fed(_chat("a", 1, 0), _chat("b", 50, 9), sequences=2).tokens == 1


def test_a_batch_that_is_not_streamed_adds_up() -> None:
    batch = [{"text": "a", "meta_info": {"completion_tokens": n}} for n in (3, 4)]
    counter = _fed(_json(batch), sequences=2)
    counter.finish()
    assert counter.tokens == 7


def test_a_tool_calls_index_is_not_a_sequences() -> None:
    delta = {"tool_calls": [{"index": 1, "function": {"name": "f", "arguments": "{}"}}]}
    event = {"choices": [{"index": 0, "delta": delta}], "usage": {"completion_tokens": 6}}
    assert _fed(_event(event), _chat("b", 2, 1), sequences=2).tokens == 8


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_where_nothing_is_counted_the_text_is_estimated(key: str) -> None:
    events = [
        _event({"choices": [{"index": 0, "delta": {key: text}, "finish_reason": None}]})
        for text in ("The quick", " brown", " fox")
    ]
    counter = _fed(*events)
    assert not counter.exact
    assert counter.tokens == _estimated("The quick brown fox", 3)


def test_the_envelope_is_not_text() -> None:
    short, long = _fed(_chat("abc")), TokenModel().counter()
    long.feed(
        _event(
            {
                "id": "x" * 900,
                "model": "a long name " * 50,
                "choices": [{"index": 0, "delta": {"content": "abc"}}],
            }
        )
    )
    assert short.tokens == long.tokens == _estimated("abc", 1)


def test_arguments_of_a_tool_call_are_text() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]}
    assert _fed(_event({"choices": [{"index": 0, "delta": call}]})).tokens == _estimated(
        '{"city": "Paris"}', 1
    )


def test_words_of_the_model_that_look_like_marks_are_text() -> None:
    counter = _fed(_chat("a"), _chat(_NASTY), _chat(_NASTY + '"'), _chat("b\\"))
    assert not counter.exact
    assert counter.tokens == _estimated("a" + _NASTY + _NASTY + '"' + "b\\", 4)


def test_reading_the_estimate_does_not_change_it() -> None:
    read, unread = TokenModel().counter(), TokenModel().counter()
    for text in ("spec", "ulat", "ive", " de", "cod", "ing"):
        read.feed(_chat(text))
        unread.feed(_chat(text))
        assert read.tokens > 0
    assert read.tokens == unread.tokens


def test_an_events_text_is_found_after_the_envelope_changed() -> None:
    other = _event({"id": "another", "choices": [{"index": 0, "delta": {"content": " dog"}}]})
    counter = _fed(_chat("a"), _chat(" cat"), other, _chat(None), _chat(" bird"), other)
    assert counter.tokens == _estimated("a cat dog bird dog", 5)


def test_envelopes_alike_at_one_end_only_are_told_apart() -> None:
    def event(head: str, text: str, tail: object) -> bytes:
        return _event({"id": head, "choices": [{"delta": {"content": text}, "logprobs": tail}]})

    known = [event("c0ffee", "a", None), event("c0ffee", " cat", None)]
    two = event("c0ffee", " dog", None) + event("c0ffee", " bird", None)
    longer = event("c0ffee" * 9, " cow", None)
    other = event("c0ffee", " pig", {"token": " pig"})
    counter = _fed(*known, two, longer, other)
    assert counter.tokens == _estimated("a cat dog bird cow pig", 6)


def test_an_event_without_text_is_not_a_token() -> None:
    assert _fed(_chat("a"), *[_chat("")] * 9).tokens == _estimated("a", 1)


def test_a_count_that_is_cut_waits_for_its_rest() -> None:
    event = _chat("c", 91)
    at = event.index(b"91") + 1
    counter = _fed(_chat("a", 2), _chat("b", 5) + event[:at])
    assert counter.tokens == 5
    counter.feed(event[at:])
    assert counter.tokens == 91


_TEXTS = st.lists(
    st.text(st.sampled_from('ab 好é👍"\\\n{}:,'), max_size=6) | st.just(_NASTY), max_size=8
)


@settings(deadline=None)
@given(texts=_TEXTS, tokens=st.integers(1, 10**6), every=st.booleans(), seed=st.integers())
# Bytes that end with a text's last quote, then alike ones that end with an escaped quote.
@example(texts=[":\\", ":", _NASTY, _NASTY, _NASTY], tokens=1, every=False, seed=99)
def test_where_the_bytes_are_cut_makes_no_difference(
    texts: list[str], tokens: int, every: bool, seed: int
) -> None:
    events = [_chat(text, tokens + i if every else None) for i, text in enumerate(texts)]
    whole = _fed(*events)
    stream = b"".join(events)
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(stream) + 1), k=rng.randrange(12)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    for fed in (_fed(*parts), _fed(*(bytes([byte]) for byte in stream)), _fed(stream)):
        assert (fed.tokens, fed.exact) == (whole.tokens, whole.exact)
    if every and texts:
        assert whole.tokens == tokens + len(texts) - 1


def test_memory_does_not_grow_with_the_stream() -> None:
    counter = _fed(*(_chat("word " * 10) for _ in range(2_000)))
    kept = [getattr(counter, slot) for slot in TokenCounter.__slots__]
    assert sum(len(value) for value in kept if isinstance(value, bytes | bytearray)) < 4096
    assert counter.tokens == pytest.approx(20_000, rel=0.3)


def test_a_finished_stream_with_a_count_teaches_its_server() -> None:
    model = TokenModel()
    counter = _fed(_chat("Hello"), _chat(" world"), _usage(50), model=model)
    counter.finish()
    counter.finish()
    assert model.estimate.tokens_seen == 50


def test_a_count_that_the_caller_knows_is_exact_and_teaches() -> None:
    model = TokenModel()
    counter = _fed(_chat("Hello"), model=model)
    counter.finish(40)
    assert (counter.tokens, counter.exact, model.estimate.tokens_seen) == (40, True, 40)


def test_a_stream_without_a_count_teaches_nothing() -> None:
    model = TokenModel()
    counter = _fed(_chat("Hello"), model=model)
    counter.finish()
    assert (counter.exact, model.estimate.tokens_seen) == (False, 0)


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_stream_counted_event_by_event_teaches_nothing(sequences: int) -> None:
    # /generate repeats the whole text in every event, so that its text is not what it seems.
    model = TokenModel()
    counter = _fed(_generate("a", 1, 0), _generate("a b", 2, 0), model=model, sequences=sequences)
    counter.finish()
    assert model.estimate.tokens_seen == 0


def test_one_answer_at_once_teaches_nothing_about_events() -> None:
    model = TokenModel()
    body = {
        "choices": [{"message": {"content": "word " * 100}}],
        "usage": {"completion_tokens": 100},
    }
    for _ in range(20):
        _fed(_json(body), model=model).finish()
    events = [_chat("word ") for _ in range(100)]
    assert _fed(*events, model=model).tokens == pytest.approx(100, rel=0.05)


def test_a_servers_total_counts_streams_under_way_and_those_that_ended() -> None:
    model = TokenModel()
    under_way = _fed(_chat("a", 3), model=model)
    over = _fed(_chat("b"), _usage(40), model=model)
    over.finish()
    over.finish()
    assert model.total_tokens() == 43
    under_way.feed(_chat("b", 7))
    assert model.total_tokens() == 47


def test_a_total_holds_no_stream_that_ended() -> None:
    model = TokenModel()
    counters = [_fed(_chat("word"), model=model) for _ in range(50)]
    estimated = model.total_tokens()
    for counter in counters:
        counter.finish()
    assert model.total_tokens() == estimated > 0
    counters[0].feed(_chat("late", 10_000))
    assert model.total_tokens() == estimated


def test_a_total_comes_to_read_every_stream_however_many() -> None:
    model = TokenModel()
    counters = [_fed(_chat("a", 10), model=model) for _ in range(300)]
    totals = [model.total_tokens() for _ in range(5)]
    assert totals == sorted(totals)
    assert totals[-1] == 3_000
    for counter in counters[::2]:
        counter.feed(_chat("b", 20))
        counter.finish()
    assert model.total_tokens() == 4_500


def test_a_total_never_falls() -> None:
    model = TokenModel()
    counter = _fed(*[_chat("some words of it")] * 20, model=model)
    estimated = model.total_tokens()
    counter.feed(_usage(20))
    counter.finish()
    assert model.total_tokens() == estimated > 20
    _fed(_chat("a", round(estimated)), model=model)
    assert model.total_tokens() == 20 + round(estimated)
