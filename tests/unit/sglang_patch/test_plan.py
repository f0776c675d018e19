import pytest

from sglang_patch.plan import PHASE_STEPS, SAMPLES, Item, Recorder, plan
from sglang_patch.rule import BatchView, Mode


def items(**changes: int) -> list[Item]:
    usual = {
        "running_max": 48,
        "request_tokens_max": 4096,
        "pool_tokens": 200_000,
        "new_tokens": 100,
        "context_tokens": 32_768,
    }
    return plan(**{**usual, **changes})


def test_batches_are_powers_of_two_the_largest_one_and_one_of_long_prompts() -> None:
    *short, long = items()
    assert [item.running for item in short] == [1, 2, 4, 8, 16, 32, 48]
    assert {item.prompt_tokens for item in short} == {16}
    assert long == Item(8, 3996)


def test_long_prompts_fill_no_more_than_their_share() -> None:
    assert items(request_tokens_max=100_000)[-1] == Item(8, 4096)
    assert items(running_max=2, request_tokens_max=100_000)[-1] == Item(2, 16_384)


@pytest.mark.parametrize("pool", [0, 500, 3000, 20_000])
def test_nothing_is_measured_that_half_the_pool_cannot_hold(pool: int) -> None:
    found = items(pool_tokens=pool)
    assert found
    assert all(
        item.running * (item.prompt_tokens + 200) <= pool / 2 for item in found if len(found) > 1
    )


def view(step: int, running: int = 4, free: int = 1 << 20) -> BatchView:
    return BatchView(step, running, free, 64, 100)


def test_both_modes_take_turns() -> None:
    recorder = Recorder()
    modes = [recorder.decide(view(step)) for step in range(4 * PHASE_STEPS)]
    assert modes == ([Mode.ON] * PHASE_STEPS + [Mode.OFF] * PHASE_STEPS) * 2


def test_no_step_speculates_without_room() -> None:
    assert Recorder().decide(view(0, free=63)) is Mode.OFF


def test_steps_of_full_batches_count_until_both_modes_have_enough() -> None:
    recorder = Recorder()
    recorder.begin(4)
    recorder.timed(Mode.ON, 3, 100, 0.01)
    for _ in range(SAMPLES):
        assert not recorder.complete
        recorder.timed(Mode.ON, 4, 100, 0.01)
        recorder.timed(Mode.OFF, 4, 100, 0.01)
    assert recorder.complete
    assert len(recorder.samples) == 2 * SAMPLES
    recorder.begin(8)
    assert not recorder.complete
