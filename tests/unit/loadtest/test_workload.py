import json
import statistics

from loadtest.workload import CHAT_MIX, Fixed, Workload


def test_a_request_is_the_same_whatever_came_before_it() -> None:
    first, second = Workload("m", CHAT_MIX, seed=3), Workload("m", CHAT_MIX, seed=3)
    for index in range(5):
        first.ask(index)
    assert first.ask(7) == second.ask(7)
    assert first.body(first.ask(7)) == second.body(second.ask(7))


def test_another_seed_asks_for_something_else() -> None:
    asks = {Workload("m", CHAT_MIX, seed).ask(0) for seed in range(5)}
    assert len(asks) > 1


def test_a_body_asks_for_a_streamed_answer_of_the_length_with_usage() -> None:
    workload = Workload("m", Fixed(50, 20), seed=1, extra={"top_p": 0.5})
    body = json.loads(workload.body(workload.ask(0)))
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 20
    assert body["ignore_eos"] is True
    assert body["top_p"] == 0.5
    assert len(body["messages"][0]["content"].split()) == 50


def test_an_engine_may_be_left_to_end_by_itself() -> None:
    workload = Workload("m", Fixed(5, 20), seed=1, ignore_eos=False)
    assert "ignore_eos" not in json.loads(workload.body(workload.ask(0)))


def test_the_mix_has_the_spread_of_conversations() -> None:
    asks = [Workload("m", CHAT_MIX, seed=1).ask(index) for index in range(2000)]
    outputs = sorted(ask.output_tokens for ask in asks)
    assert 100 < statistics.median(outputs) < 180
    assert outputs[-20] > 3 * statistics.median(outputs)
    assert all(4 <= ask.output_tokens <= 700 and 4 <= ask.prompt_tokens <= 3000 for ask in asks)
