import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.tally import EVENT_BYTES_MAX, Tally


def event(**delta: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":16}}\n\n'
)
ANSWER = (
    event(role="assistant", content="")
    + event(content="Hello ")
    + event(content='a "quoted" word\n\n')
    + event(content="")
    + event(content="end")
    + USAGE
    + b"data: [DONE]\n\n"
)


@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_a_tally_is_the_same_however_the_answer_is_cut(cuts: set[int]) -> None:
    tally = Tally()
    edges = [0, *sorted(cuts), len(ANSWER)]
    for now, (start, end) in enumerate(pairwise(edges)):
        tally.feed(ANSWER[start:end], float(now))
    assert (tally.events, len(tally.gaps)) == (3, 2)
    assert tally.usage() == (9, 7)
    assert tally.done
    assert tally.first is not None
    assert tally.last == pytest.approx(tally.first + sum(tally.gaps))


def test_only_events_with_text_set_the_times() -> None:
    tally = Tally()
    tally.feed(event(role="assistant", content=""), 1.0)
    assert tally.first is None
    tally.feed(event(content="a"), 2.0)
    tally.feed(event(content="b"), 2.5)
    tally.feed(USAGE + b"data: [DONE]\n\n", 9.0)
    assert (tally.first, tally.last, list(tally.gaps)) == (2.0, 2.5, [0.5])


def test_reasoning_tool_arguments_and_completions_count_as_text() -> None:
    tally = Tally()
    tally.feed(event(reasoning_content="hm"), 1.0)
    tally.feed(event(tool_calls=[{"function": {"arguments": "{}"}}]), 2.0)
    tally.feed(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n', 3.0)
    assert tally.events == 3


def test_events_that_arrive_together_are_no_time_apart() -> None:
    tally = Tally()
    tally.feed(event(content="a") + event(content="b"), 1.0)
    tally.feed(event(content="c") + event(content="d"), 2.0)
    assert list(tally.gaps) == [0.0, 1.0, 0.0]


def test_line_ends_of_other_servers_are_understood() -> None:
    tally = Tally()
    for byte in ANSWER.replace(b"\n\n", b"\r\n\r\n"):
        tally.feed(bytes([byte]), 1.0)
    assert (tally.events, tally.usage(), tally.done) == (3, (9, 7), True)


def test_the_last_of_several_usages_counts() -> None:
    tally = Tally()
    for tokens in (1, 2, 5):
        tally.feed(
            b'data: {"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n' % tokens,
            float(tokens),
        )
    assert tally.usage() == (3, 5)


def test_an_error_event_is_kept_with_its_message() -> None:
    tally = Tally()
    tally.feed(event(content="a"), 1.0)
    tally.feed(b'data: {"error": {"message": "engine went away", "code": 502}}\n\n', 2.0)
    assert tally.error_message() == "engine went away"
    assert not tally.done


def test_no_usage_is_unknown_and_a_broken_one_too() -> None:
    assert Tally().usage() == (None, None)
    tally = Tally()
    tally.feed(b'data: {"usage":{"completion_tokens":"many"\n\n', 1.0)
    assert tally.usage() == (None, None)


def test_an_endless_event_is_refused() -> None:
    tally = Tally()
    with pytest.raises(ValueError, match="longer"):
        tally.feed(b"x" * (EVENT_BYTES_MAX + 1), 1.0)


def test_generate_says_its_counts_beside_the_text() -> None:
    tally = Tally(keep_text=True)
    for count, text in ((1, "one"), (2, "one two")):
        meta = {"prompt_tokens": 9, "completion_tokens": count}
        data = json.dumps({"text": text, "meta_info": meta}).encode()
        tally.feed(b"data: " + data + b"\n\n", float(count))
    tally.feed(b"data: [DONE]\n\n", 3.0)
    assert (tally.events, tally.usage(), tally.done) == (2, (9, 2), True)
    assert tally.text() == "one two"


def test_text_is_kept_only_if_asked_for() -> None:
    kept, dropped = Tally(keep_text=True), Tally()
    for tally in (kept, dropped):
        tally.feed(ANSWER, 1.0)
    assert kept.text() == 'Hello a "quoted" word\n\nend'
    assert dropped.text() == ""


def test_text_of_completions_is_kept() -> None:
    tally = Tally(keep_text=True)
    tally.feed(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n', 3.0)
    tally.feed(b'data: {"choices":[{"index":0,"text":"y"}]}\n\n', 3.0)
    assert tally.text() == "xy"
