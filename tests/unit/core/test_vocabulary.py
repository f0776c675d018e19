"""Tokens by a known vocabulary. The windows of whole servers are in test_token_estimate.py."""

import json

import pytest

from router.core.tokens import TokenModel
from router.core.vocabulary import Vocabulary

WORDS = [" the", "the", " cat", " c", "at", "c", "a", "t", "s", " ", "\n", "\n\n", ",", "1", "12"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("the cat", 2),
        (" cats", 2),
        ("the,the", 3),
        ("the\n\nthe", 3),
        ("1212", 2),
        ("121", 2),
        ("the\nthe", 3),
    ],
)
def test_the_longest_tokens_are_counted_from_the_left(text: str, tokens: int) -> None:
    assert Vocabulary(WORDS).count(text) == tokens


def test_pieces_add_up() -> None:
    vocabulary = Vocabulary(WORDS)
    assert vocabulary.count("the cat,") == vocabulary.count("the") + vocabulary.count(" cat,")


def test_a_word_between_chinese_is_cut_at_its_tokens() -> None:
    assert Vocabulary(["推测", "解码", "的", "推", "测"]).count("推测解码的推测") == 4


def test_a_character_without_a_token_costs_its_bytes_less_one() -> None:
    vocabulary = Vocabulary(["的"])
    assert vocabulary.count("的粥") == 1 + 2
    assert vocabulary.count("👍") == 3


def test_a_space_takes_part_of_a_character_where_the_vocabulary_joins_them() -> None:
    apart = Vocabulary([" ", "导入", "导", "入", " a"])
    joined = Vocabulary([" ", "导入", "导", "入", " a", " 的"])
    assert (apart.count(" 导入"), joined.count(" 导入")) == (2, 3)


def test_a_decoder_that_drops_the_space_of_a_word_is_understood() -> None:
    assert Vocabulary(["the", "cat", ","]).count("the cat, the cat") == 5


def test_what_it_remembers_is_bounded() -> None:
    vocabulary = Vocabulary(WORDS)
    for n in range(50_000):
        vocabulary.count(f"word{n} ")
    assert len(vocabulary) <= 20_000
    assert vocabulary.count("the cat") == 2


def test_its_size_is_the_tokens_that_are_text() -> None:
    assert Vocabulary(["a", "b", "", "a", "x" * 500]).size == 2


def _event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":%s}}]}\n\n' % json.dumps(text).encode()


def test_a_stream_that_tells_no_count_is_counted_by_the_vocabulary() -> None:
    model = TokenModel()
    model.use(Vocabulary([*WORDS, '"', "\\", "`"]))
    counter = model.counter()
    for text in ("the cat", "\n\n", ' cat"', ' the"'):
        counter.feed(_event(text))
    assert counter.tokens == 7
    assert not counter.exact
    counter.finish()
    assert model.total_tokens() == 7


def test_a_count_that_is_told_wins() -> None:
    model = TokenModel()
    model.use(Vocabulary(WORDS))
    counter = model.counter()
    counter.feed(_event("the cat"))
    counter.feed(b'data: {"usage":{"completion_tokens":40}}\n\n')
    counter.finish()
    assert counter.tokens == 40


def test_every_event_is_a_token_at_least() -> None:
    model = TokenModel()
    model.use(Vocabulary(["aa", "a"]))
    counter = model.counter()
    for _ in range(10):
        counter.feed(_event("a"))
    assert counter.tokens == 10


def test_a_stream_keeps_to_what_was_known_when_it_began() -> None:
    model = TokenModel()
    counter = model.counter()
    counter.feed(_event("the cat"))
    before = counter.tokens
    model.use(Vocabulary(["the cat"]))
    assert counter.tokens == before
