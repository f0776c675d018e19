"""The scheduler of the engine model: what a step does, how long it takes, what it leaves behind."""

import random
from dataclasses import replace

import pytest

from loadtest.engine_batch import Sequence, State
from loadtest.engine_model import Engine, Gpu, QueueFullError, Step, Work
from loadtest.engine_params import Acceptance, DecodeMode, EngineParams

PLAIN = EngineParams(
    name="plain",
    source="test",
    decode=DecodeMode(((1, 0.010), (11, 0.020))),
    prefill_pass_s=0.005,
    prefill_token_s=0.001,
    kv_tokens=10_000,
    context_tokens=4_000,
    prefill_pass_tokens=100,
)
TREE = replace(
    PLAIN, decode=DecodeMode(PLAIN.decode.points, Acceptance(2.2, longest=3), step_slots=16)
)


@pytest.fixture(name="rng")
def _rng() -> random.Random:
    return random.Random(0)


def step_of(engine: Engine, rng: random.Random) -> Step:
    assert engine.begin() is not None
    return engine.end(rng)


def run(engine: Engine, rng: random.Random) -> list[Step]:
    steps = []
    while engine.begin() is not None:
        steps.append(engine.end(rng))
    return steps


def submit(engine: Engine, count: int, prompt: int = 10, output: int = 10) -> list[Sequence]:
    sequences = [Sequence(prompt, output) for _ in range(count)]
    for sequence in sequences:
        engine.submit(sequence)
    return sequences


def test_an_idle_engine_has_nothing_to_do() -> None:
    engine = Engine(PLAIN)
    assert engine.begin() is None
    assert not engine.has_work


def test_prefill_takes_a_pass_and_each_token_and_gives_the_first_token(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    first, second = submit(engine, 2)
    step = step_of(engine, rng)
    assert step.work is Work.PREFILL
    assert step.duration_s == pytest.approx(0.005 + 20 * 0.001)
    assert step.emitted == [(first, 1), (second, 1)]
    assert engine.num_running == 2


def test_prefill_blocks_decode(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    submit(engine, 1)
    step_of(engine, rng)
    (late,) = submit(engine, 1)
    assert step_of(engine, rng).emitted == [(late, 1)]
    assert step_of(engine, rng).work is Work.DECODE


def test_a_long_prompt_is_prefilled_in_chunks(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    (sequence,) = submit(engine, 1, prompt=250)
    steps = [step_of(engine, rng) for _ in range(3)]
    assert [step.duration_s for step in steps] == pytest.approx([0.105, 0.105, 0.055])
    assert [step.emitted for step in steps] == [[], [], [(sequence, 1)]]


def test_a_chunk_leaves_its_rest_of_the_pass_to_the_next(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    long, short = Sequence(150, 5), Sequence(30, 5)
    engine.submit(long)
    engine.submit(short)
    assert step_of(engine, rng).emitted == []
    assert step_of(engine, rng).emitted == [(long, 1), (short, 1)]


def test_step_time_is_linear_between_points_and_goes_on_beyond_the_last() -> None:
    mode = PLAIN.decode
    assert mode.step_s(1) == pytest.approx(0.010)
    assert mode.step_s(6) == pytest.approx(0.015)
    assert mode.step_s(11) == pytest.approx(0.020)
    assert mode.step_s(21) == pytest.approx(0.030)


def test_a_longer_context_takes_longer(rng: random.Random) -> None:
    durations = []
    for prompt in (100, 1_000):
        engine = Engine(replace(PLAIN, kv_token_s=1e-6))
        submit(engine, 1, prompt=prompt)
        decode = next(step for step in run(engine, rng) if step.work is Work.DECODE)
        durations.append(decode.duration_s)
    assert durations[1] - durations[0] == pytest.approx(900e-6)


def test_a_plain_engine_gives_one_token_a_step_and_ends_at_the_limit(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    (sequence,) = submit(engine, 1, output=5)
    steps = run(engine, rng)
    assert [step.emitted for step in steps] == [[(sequence, 1)]] * 5
    assert steps[-1].ended == [sequence]
    assert sequence.state is State.FINISHED
    assert engine.kv_used_tokens == 0
    assert not engine.has_work


def test_a_speculating_engine_gives_its_mean_accept_length(rng: random.Random) -> None:
    engine = Engine(TREE)
    submit(engine, 40, output=500)
    steps = [step for step in run(engine, rng) if step.work is Work.DECODE]
    sizes = {tokens for step in steps for _, tokens in step.emitted}
    assert sizes == {1, 2, 3}
    totals = engine.totals
    assert totals.decoded_tokens / totals.sequence_steps == pytest.approx(2.2, rel=0.02)
    assert totals.output_tokens == 40 * 500


def test_requests_differ_in_how_much_is_accepted(rng: random.Random) -> None:
    engine = Engine(TREE)
    sequences = submit(engine, 20, output=500)
    run(engine, rng)
    assert len({sequence.decode_steps for sequence in sequences}) > 5


@pytest.mark.parametrize(("mean", "longest"), [(1.0, 3), (1.1, 3), (2.2, 3), (2.2, 4), (4.0, 4)])
def test_the_chances_of_a_step_add_up_to_its_mean(mean: float, longest: int) -> None:
    chances = Acceptance(mean, longest).chances(mean)
    assert len(chances) == longest - 1
    assert 1 + sum(chances) == pytest.approx(mean, abs=1e-6)
    assert list(chances) == sorted(chances, reverse=True)


def test_a_mean_beyond_the_longest_step_is_refused() -> None:
    with pytest.raises(ValueError, match="mean accept length"):
        Acceptance(3.5, longest=3)


def test_no_more_run_than_the_limit(rng: random.Random) -> None:
    engine = Engine(PLAIN, max_running_requests=3)
    submit(engine, 5)
    step_of(engine, rng)
    assert (engine.num_running, len(engine.waiting)) == (3, 2)


def test_a_full_queue_takes_no_more() -> None:
    engine = Engine(PLAIN, max_queued_requests=2)
    submit(engine, 2)
    with pytest.raises(QueueFullError):
        engine.submit(Sequence(1, 1))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than the context"):
        Engine(PLAIN).submit(Sequence(3_990, 11))


def test_admission_stops_where_the_kv_cache_would_not_hold(rng: random.Random) -> None:
    engine = Engine(replace(PLAIN, kv_tokens=5_000))
    submit(engine, 3, prompt=10, output=2_000)
    step_of(engine, rng)
    assert (engine.num_running, len(engine.waiting)) == (2, 1)


def test_requests_are_retracted_when_the_kv_cache_is_full_and_lose_no_token(
    rng: random.Random,
) -> None:
    engine = Engine(replace(TREE, kv_tokens=4_000, prefill_pass_tokens=1_000))
    sequences = submit(engine, 4, prompt=10, output=500)
    step_of(engine, rng)
    # Beside four that hold little so far, admission takes more than the cache can hold to the end.
    sequences += submit(engine, 12, prompt=10, output=500)
    received = dict.fromkeys(sequences, 1)
    received.update(dict.fromkeys(sequences[4:], 0))
    for step in run(engine, rng):
        assert engine.kv_used_tokens <= 4_000
        for sequence, tokens in step.emitted:
            received[sequence] += tokens
    assert engine.totals.retractions > 0
    assert sum(sequence.retractions for sequence in sequences) == engine.totals.retractions
    assert set(received.values()) == {500}
    assert engine.kv_used_tokens == 0


def test_a_sequence_that_is_being_aborted_is_not_retracted(rng: random.Random) -> None:
    engine = Engine(replace(TREE, kv_tokens=4_000, context_tokens=1_000))
    submit(engine, 3, output=900)
    step_of(engine, rng)
    submit(engine, 3, output=900)
    while engine.kv_used_tokens + 6 * 16 <= 4_000:
        step_of(engine, rng)
    last = min(engine.running, key=lambda sequence: sequence.output_tokens)
    engine.abort(last)
    assert step_of(engine, rng).ended == [last]
    assert (last.state, last.retractions) == (State.ABORTED, 0)
    assert engine.totals.retractions > 0


def test_a_waiting_sequence_is_aborted_at_once(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    (sequence,) = submit(engine, 1)
    engine.abort(sequence)
    assert sequence.state is State.ABORTED
    assert engine.begin() is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_running_sequence_is_aborted_with_a_step(rng: random.Random, begun: bool) -> None:
    engine = Engine(PLAIN)
    stays, goes = submit(engine, 2)
    step_of(engine, rng)
    if begun:
        engine.begin()
    engine.abort(goes)
    step = engine.end(rng) if begun else step_of(engine, rng)
    assert step.emitted == [(stays, 1)]
    assert step.ended == [goes]
    assert goes.state is State.ABORTED
    assert engine.kv_used_tokens == stays.context_tokens


def test_an_abort_between_the_chunks_of_a_prompt_frees_what_it_holds(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    (sequence,) = submit(engine, 1, prompt=250)
    step_of(engine, rng)
    engine.abort(sequence)
    assert step_of(engine, rng).ended == [sequence]
    assert engine.kv_used_tokens == 0
    assert engine.begin() is None


def test_a_cached_prompt_needs_no_prefill(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    engine.submit(Sequence(80, 1, cached_tokens=79))
    assert step_of(engine, rng).duration_s == pytest.approx(0.005 + 0.001)
    assert engine.kv_used_tokens == 0


def test_a_sequence_without_output_ends_with_its_prefill(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    (sequence,) = submit(engine, 1, output=0)
    step = step_of(engine, rng)
    assert (step.emitted, step.ended) == ([], [sequence])


def test_engines_on_one_gpu_slow_each_other_while_both_have_work(rng: random.Random) -> None:
    gpu = Gpu()
    one, other = Engine(PLAIN, gpu), Engine(PLAIN, gpu)
    submit(one, 1)
    alone_s = one.begin()
    one.end(rng)
    submit(other, 1)
    submit(one, 1)
    together_s = one.begin()
    assert alone_s is not None
    assert together_s == pytest.approx(alone_s / Gpu.CONTENDED_SHARE_OF_TWO)
    assert Engine(PLAIN).gpu.slowdown() == 1.0


def test_a_step_is_begun_once_and_ended_once(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    with pytest.raises(RuntimeError):
        engine.end(rng)
    submit(engine, 1)
    engine.begin()
    with pytest.raises(RuntimeError):
        engine.begin()


def test_the_same_seed_gives_the_same_run() -> None:
    def emitted(seed: int) -> list[list[int]]:
        engine = Engine(TREE)
        submit(engine, 5, output=50)
        return [[tokens for _, tokens in s.emitted] for s in run(engine, random.Random(seed))]

    assert emitted(1) == emitted(1)
    assert emitted(1) != emitted(2)


@pytest.mark.parametrize("params", [PLAIN, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("horizon_s", [0.05, 1e9])
def test_steps_taken_together_are_those_taken_one_by_one(
    params: EngineParams, horizon_s: float
) -> None:
    def ends(horizon_s: float, each: bool) -> list[tuple[float, int]]:
        engine = Engine(replace(params, kv_token_s=1e-6))
        rng, found, now_s = random.Random(4), [], 0.0
        for output in (40, 55, 90, 200):
            engine.submit(Sequence(10, output, key=output))
        while (duration_s := engine.begin(horizon_s)) is not None:
            now_s += duration_s
            ended = engine.end(rng, each=each).ended
            found += [(round(now_s, 9), sequence.output_tokens) for sequence in ended]
        assert engine.kv_used_tokens == 0
        return found

    assert ends(horizon_s, each=False) == ends(0.0, each=True)


def test_a_change_of_model_keeps_every_token_and_takes_its_effect(rng: random.Random) -> None:
    engine = Engine(TREE)
    (sequence,) = submit(engine, 1, output=600)
    for _ in range(100):
        step_of(engine, rng)
    before = sequence.output_tokens
    engine.change(replace(TREE, decode=replace(TREE.decode, acceptance=Acceptance(1.0, longest=3))))
    rest = run(engine, rng)
    assert len(rest) == 600 - before
    assert engine.totals.output_tokens == sequence.output_tokens == 600


def test_slowness_scales_every_step(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    engine.slowness = 1.8
    submit(engine, 1)
    assert step_of(engine, rng).duration_s == pytest.approx(1.8 * 0.015)
    assert step_of(engine, rng).duration_s == pytest.approx(1.8 * 0.010)


def test_steps_taken_together_can_be_cut_at_the_step_under_way(rng: random.Random) -> None:
    engine = Engine(PLAIN)
    submit(engine, 1, output=50)
    assert engine.cut(0.0) is None
    step_of(engine, rng)
    assert engine.begin(0.2) == pytest.approx(0.2)
    assert engine.cut(0.031) == pytest.approx(0.04)
    engine.end(rng, each=False)
    assert engine.totals.decode_steps == 4
    assert engine.kv_used_tokens == 10 + 5
