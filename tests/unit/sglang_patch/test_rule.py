import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patch.rule import BatchView, Mode, ScheduledRule, ThresholdRule

ROOMY = 1 << 20


def view(step: int, running: int, free: int = ROOMY, needed: int = 16) -> BatchView:
    return BatchView(step=step, running=running, kv_free_tokens=free, kv_on_tokens=needed)


def modes(rule: ThresholdRule, sizes: list[int]) -> list[Mode]:
    return [rule.decide(view(step, size)) for step, size in enumerate(sizes)]


def test_is_off_only_above_the_disabling_threshold() -> None:
    rule = ThresholdRule(disable_above=8, enable_at=8, dwell_steps=0)
    assert modes(rule, [1, 8, 9, 8]) == [Mode.ON, Mode.ON, Mode.OFF, Mode.ON]


def test_keeps_its_mode_between_the_thresholds() -> None:
    rule = ThresholdRule(disable_above=8, enable_at=5, dwell_steps=0)
    assert modes(rule, [6, 9, 6, 5, 6]) == [Mode.ON, Mode.OFF, Mode.OFF, Mode.ON, Mode.ON]


def test_off_dwells_in_decode_steps() -> None:
    rule = ThresholdRule(disable_above=8, enable_at=8, dwell_steps=3)
    assert modes(rule, [9, 1, 1, 1, 1]) == [Mode.OFF] * 3 + [Mode.ON] * 2


def test_a_batch_that_grows_right_after_a_switch_to_on_is_off_at_once() -> None:
    """Else every dwell would begin with ON steps of a full batch, each worth many OFF steps."""
    rule = ThresholdRule(disable_above=8, enable_at=8, dwell_steps=3)
    assert modes(rule, [9, 1, 1, 1, 200]) == [Mode.OFF] * 3 + [Mode.ON, Mode.OFF]


def test_threshold_zero_never_speculates() -> None:
    rule = ThresholdRule(disable_above=0, enable_at=0, dwell_steps=0)
    assert set(modes(rule, [1, 2, 1, 1])) == {Mode.OFF}


def test_a_step_whose_reservation_does_not_fit_is_off_rather_than_retracted() -> None:
    rule = ThresholdRule(disable_above=8, enable_at=8, dwell_steps=0)
    assert rule.decide(view(0, 4, free=64, needed=64)) is Mode.ON
    assert rule.decide(view(1, 4, free=63, needed=64)) is Mode.OFF


def test_speculation_resumes_only_with_headroom() -> None:
    rule = ThresholdRule(disable_above=8, enable_at=8, dwell_steps=0)
    rule.decide(view(0, 9))
    assert rule.decide(view(1, 4, free=127, needed=64)) is Mode.OFF
    assert rule.decide(view(2, 4, free=128, needed=64)) is Mode.ON


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on", "1111"),
        ("off", "0000"),
        ("every:1", "1010"),
        ("every:2", "1100"),
    ],
)
def test_schedules_force_the_mode_by_step(text: str, expected: str) -> None:
    rule = ScheduledRule.parse(text)
    seen = "".join(str(int(rule.decide(view(step, 99)) is Mode.ON)) for step in range(4))
    assert seen == expected


def test_random_schedules_mix_both_modes_and_repeat_by_seed() -> None:
    def draw(seed: int) -> list[Mode]:
        rule = ScheduledRule.parse(f"random:{seed}")
        return [rule.decide(view(step, 1)) for step in range(400)]

    assert draw(1) == draw(1) != draw(2)
    assert 150 < draw(1).count(Mode.ON) < 250


@pytest.mark.parametrize("text", ["", "every:0", "every:", "random", "random:x", "sometimes"])
def test_unknown_schedules_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="every:K"):
        ScheduledRule.parse(text)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=80),
    free=st.lists(st.integers(0, 2000), min_size=80, max_size=80),
    thresholds=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    dwell=st.integers(0, 10),
)
def test_a_step_that_does_not_fit_never_speculates(
    sizes: list[int], free: list[int], thresholds: tuple[int, int], dwell: int
) -> None:
    rule = ThresholdRule(max(thresholds), min(thresholds), dwell)
    before = Mode.ON
    for step, size in enumerate(sizes):
        needed = 16 * size
        mode = rule.decide(view(step, size, free[step], needed))
        if mode is Mode.ON:
            assert free[step] >= needed * (2 if before is Mode.OFF else 1)
        before = mode
