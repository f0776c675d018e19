import json
import random
import statistics

from loadtest.workload import (
    CHAT_MIX,
    Api,
    Conversation,
    Drawn,
    Fixed,
    Lognormal,
    Recorded,
    SharedPrefix,
    Uniform,
    Workload,
)


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


def test_each_api_is_asked_in_its_own_words() -> None:
    bodies = {
        api: json.loads(w.body(w.ask(0)))
        for api in Api
        for w in [Workload("m", Fixed(5, 20), seed=1, api=api)]
    }
    assert len(bodies[Api.COMPLETIONS]["prompt"].split()) == 5
    assert bodies[Api.COMPLETIONS]["max_tokens"] == 20
    assert len(bodies[Api.GENERATE]["text"].split()) == 5
    assert bodies[Api.GENERATE]["sampling_params"]["max_new_tokens"] == 20
    assert bodies[Api.GENERATE]["sampling_params"]["ignore_eos"] is True
    assert all(body["stream"] for body in bodies.values())


def test_shared_prefixes_take_turns_in_front_of_prompts_of_their_own() -> None:
    workload = Workload("m", Fixed(5, 20), seed=1, prefix=SharedPrefix(30, count=2))
    messages = [json.loads(workload.body(workload.ask(n)))["messages"] for n in range(4)]
    prefixes = [system["content"] for system, _ in messages]
    assert prefixes[0] == prefixes[2] != prefixes[1] == prefixes[3]
    assert len(prefixes[0].split()) == 30
    assert len({user["content"] for _, user in messages}) == 4


def test_a_later_turn_carries_what_was_said_before_it() -> None:
    workload = Workload("m", Fixed(5, 20), seed=1, turns=3)
    ask = workload.ask(4, turn=1)
    assert workload.prompt(ask) != workload.prompt(workload.ask(4))
    said = json.loads(workload.body(ask, [("q", "a")]))["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "user"]
    assert [m["content"] for m in said[:2]] == ["q", "a"]
    assert workload.turns_of(4) == 3


def test_real_prompts_are_sent_as_they_are_over_and_over() -> None:
    talks = (
        Conversation(("one", "two"), (7, None), "Be brief."),
        Conversation(("three",), (None,)),
    )
    workload = Workload("m", Fixed(9, 20), seed=1, turns=2, conversations=talks)
    body = json.loads(workload.body(workload.ask(2)))
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
    ]
    assert [workload.ask(n, t).output_tokens for n, t in ((0, 0), (0, 1), (1, 0))] == [7, 20, 20]
    assert [workload.turns_of(n) for n in range(3)] == [2, 1, 2]


def test_recorded_lengths_come_in_their_order_over_and_over() -> None:
    workload = Workload("m", Recorded(((1, 2), (3, 4))), seed=1)
    asks = [workload.ask(n) for n in (0, 1, 2)]
    assert [(a.prompt_tokens, a.output_tokens) for a in asks] == [(1, 2), (3, 4), (1, 2)]


def test_drawn_lengths_keep_to_their_distributions() -> None:
    rng = random.Random(1)
    drawn = [Drawn(Uniform(3, 9), Lognormal(100, 0.5, 200)).draw(n, rng) for n in range(2000)]
    assert {prompt for prompt, _ in drawn} == set(range(3, 10))
    assert 95 < statistics.median(output for _, output in drawn) < 105
    assert max(output for _, output in drawn) == 200
