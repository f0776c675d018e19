import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_patch.estimates import Figures
from sglang_patch.goodput import (
    MARGIN,
    PROBE_BUDGET,
    PROBE_PERIOD_STEPS,
    PROBE_STEPS,
    GoodputRule,
    Learnt,
)
from sglang_patch.rule import SHARE_STEPS, BatchView, Mode, ScheduledRule, ThresholdRule
from sglang_patch.step_times import Curve, StepTimes
from tests.unit.sglang_patch.goodput_rig import ACCEPT_MAX, CHAIN, Bench, make_rule


def scaled(times: StepTimes, on: float, off: float) -> StepTimes:
    return StepTimes(
        Curve(times.on.batches, tuple(on * s for s in times.on.seconds), times.on.context_token_s),
        Curve(
            times.off.batches, tuple(off * s for s in times.off.seconds), times.off.context_token_s
        ),
    )


def knowing(accept: float, times: StepTimes = CHAIN, **more: object) -> GoodputRule:
    """A rule that has learnt an accept length."""
    rule = make_rule(times, **more)
    rule.adopt(Learnt(accept=Figures(accept)))
    return rule


def decide(rule: GoodputRule, step: int, running: int, context_tokens: int = 0) -> Mode:
    return rule.decide(BatchView(step, running, 1 << 20, 64, context_tokens))


def test_break_even_is_the_ratio_of_the_step_times() -> None:
    assert make_rule().break_even(64, 0) == pytest.approx(0.0107 / 0.0066)


@pytest.mark.parametrize(("running", "mode"), [(1, Mode.ON), (64, Mode.ON), (256, Mode.OFF)])
def test_the_mode_is_the_one_with_more_tokens_a_second(running: int, mode: Mode) -> None:
    assert decide(knowing(2.2), 0, running) is mode


def test_a_worse_draft_speculates_less() -> None:
    assert decide(knowing(1.4), 0, 64) is Mode.OFF
    assert decide(knowing(1.4), 0, 1) is Mode.ON
    assert decide(knowing(1.2), 0, 1) is Mode.OFF


def test_long_contexts_move_the_break_even_against_the_batch_size() -> None:
    """Both modes read the KV cache once, so the more of it there is, the less speculation costs;
    the more requests there are, the more it does.
    """
    rule = knowing(2.2)
    by_batch = [rule.break_even(running, 100 * running) for running in (1, 64, 128, 256)]
    by_context = [rule.break_even(128, 128 * each) for each in (100, 1000, 10_000, 30_000)]
    assert by_batch == sorted(by_batch)
    assert by_context == sorted(by_context, reverse=True)
    assert decide(knowing(2.0), 0, 128, 128 * 100) is Mode.OFF
    assert decide(knowing(2.0), 0, 128, 128 * 10_000) is Mode.ON


def test_speculation_comes_back_only_with_a_margin() -> None:
    even = CHAIN.predict(Mode.ON, 64, 0) / CHAIN.predict(Mode.OFF, 64, 0)
    rule = knowing(even * (1 + MARGIN / 2))
    assert decide(rule, 0, 64) is Mode.ON  # it was on, and gains
    assert decide(rule, 1, 256) is Mode.OFF
    assert decide(rule, 100, 64) is Mode.OFF  # it gains less than the margin
    rule = knowing(even * (1 + 2 * MARGIN))
    decide(rule, 1, 256)
    assert decide(rule, 100, 64) is Mode.ON


def test_off_dwells_and_on_does_not() -> None:
    rule = knowing(2.2)
    sizes = [1, 256, *[1] * 20, 256]
    modes = [decide(rule, step, running) for step, running in enumerate(sizes)]
    assert modes == [Mode.ON, *[Mode.OFF] * 16, *[Mode.ON] * 5, Mode.OFF]


def test_a_step_without_room_is_off_and_comes_back_with_headroom() -> None:
    rule = knowing(2.2)
    free = [64, 63, 127, 128]
    modes = [rule.decide(BatchView(step, 1, kv, 64)) for step, kv in enumerate(free)]
    assert modes == [Mode.ON, Mode.OFF, Mode.OFF, Mode.ON]


def test_an_unknown_draft_is_tried_where_a_perfect_one_would_pay() -> None:
    assert decide(make_rule(), 0, 256) is Mode.ON
    slow = scaled(CHAIN, on=2.0, off=1.0)
    assert decide(make_rule(slow), 0, 256) is Mode.OFF


def test_what_is_learnt_counts_from_the_next_shared_step_on() -> None:
    """At 256 requests an accept length of 2.2 does not pay; until that is known it might."""
    bench = Bench(make_rule())
    modes = bench.run(SHARE_STEPS + 2, running=256)
    assert modes[:SHARE_STEPS] == [Mode.ON] * SHARE_STEPS
    assert modes[SHARE_STEPS:] == [Mode.OFF] * 2


def test_acceptance_is_that_of_warm_on_steps() -> None:
    rule = make_rule()
    for mode, tokens in ((Mode.ON, 8), (Mode.ON, 12), (Mode.OFF, 4), (Mode.ON, 4), (Mode.ON, 12)):
        rule.yielded(mode, 4, tokens, stale=False)
    rule.yielded(Mode.ON, 4, 4, stale=True)
    assert rule.propose().accept.overall == pytest.approx(3.0)


def test_a_wrong_table_is_corrected_by_what_steps_take() -> None:
    """By the table speculation pays at 128 requests; in truth it takes twice as long there."""
    table = scaled(CHAIN, on=0.5, off=1.0)
    bench = Bench(make_rule(table), accept=1.9)
    bench.run(2 * SHARE_STEPS, running=128)
    modes = bench.run(400, running=128)
    assert modes.count(Mode.OFF) >= 390
    assert bench.rule.break_even(128, 0) == pytest.approx(0.0176 / 0.0086, rel=0.05)


def test_stalls_teach_nothing() -> None:
    calm, stalling = (Bench(make_rule(), stalls=stalls) for stalls in (None, random.Random(3)))
    for bench in (calm, stalling):
        bench.run(10 * SHARE_STEPS, running=64)
    assert stalling.rule.break_even(64, 0) == pytest.approx(calm.rule.break_even(64, 0), rel=0.01)


def test_times_that_are_given_stay_as_they_are() -> None:
    bench = Bench(make_rule(fixed=True), truth=scaled(CHAIN, on=2.0, off=1.0))
    bench.run(5 * SHARE_STEPS, running=64)
    assert bench.rule.break_even(64, 0) == pytest.approx(0.0107 / 0.0066)


def test_a_draft_that_became_better_is_found_by_trying() -> None:
    bench = Bench(make_rule(), accept=1.4)
    assert bench.run(500, running=64)[-100:] == [Mode.OFF] * 100
    bench.accept = 2.5
    assert Mode.ON in bench.run(2000, running=64)
    assert bench.run(100, running=64) == [Mode.ON] * 100


def test_nothing_is_tried_where_no_draft_could_pay() -> None:
    bench = Bench(make_rule(scaled(CHAIN, on=2.0, off=1.0)), truth=scaled(CHAIN, on=2.0, off=1.0))
    assert set(bench.run(8000, running=256)) == {Mode.OFF}


def test_times_given_for_good_are_not_tried_out() -> None:
    rule = knowing(1.55, fixed=True)
    assert {decide(rule, step, 64) for step in range(4 * PROBE_PERIOD_STEPS)} == {Mode.OFF}


def test_a_trial_ends_at_once_where_the_batch_grows_out_of_it() -> None:
    rule = knowing(1.55, scaled(CHAIN, on=1.3, off=1.0))
    modes = [decide(rule, step, 8) for step in range(PROBE_PERIOD_STEPS)]
    assert modes[-1] is Mode.OFF
    assert decide(rule, PROBE_PERIOD_STEPS, 8) is Mode.ON
    assert decide(rule, PROBE_PERIOD_STEPS + 1, 10_000) is Mode.OFF


@settings(max_examples=40, deadline=None)
@given(accept=st.floats(1.0, 4.0), running=st.integers(1, 256))
def test_what_trying_costs_stays_within_its_budget(accept: float, running: int) -> None:
    rule, steps = knowing(accept), 20 * PROBE_PERIOD_STEPS
    modes = [decide(rule, step, running) for step in range(steps)]
    usual = modes[0]
    cost = rule.break_even(running, 0) / rule.accept_length(running)
    loss = cost - 1 if usual is Mode.OFF else 1 / cost - 1
    tried = sum(mode is not usual for mode in modes)
    assert tried * loss <= PROBE_BUDGET * steps + PROBE_STEPS * loss
    assert tried <= PROBE_STEPS * steps / PROBE_PERIOD_STEPS


@settings(max_examples=40, deadline=None)
@given(
    accept=st.floats(1.05, 3.9),
    running=st.sampled_from([1, 8, 32, 64, 100, 128, 200, 256]),
    context=st.sampled_from([100, 4000]),
    error=st.tuples(st.floats(0.8, 1.25), st.floats(0.8, 1.25)),
)
def test_whatever_the_engine_the_better_mode_is_found(
    accept: float, running: int, context: int, error: tuple[float, float]
) -> None:
    bench = Bench(make_rule(scaled(CHAIN, *error)), accept=accept)
    accept = round(accept * running) / running
    bench.accept = accept
    ratio = bench.truth.predict(Mode.ON, running, context * running) / bench.truth.predict(
        Mode.OFF, running, context * running
    )
    assume(abs(accept / ratio - 1) > 2 * MARGIN)
    bench.run(2500, running, context * running)
    modes = bench.run(600, running, context * running)
    wrong = sum(mode is not bench.best(running, context * running) for mode in modes)
    assert wrong <= 2 * PROBE_STEPS * (1 + 600 // PROBE_PERIOD_STEPS)


@pytest.mark.parametrize("accept", [1.3, 2.2, 3.0])
@pytest.mark.parametrize("running", [1, 8, 32, 64, 128, 256])
def test_no_fixed_rule_gets_more_out_of_this_engine(running: int, accept: float) -> None:
    """Learning and trying included, from the first step on."""
    fixed = (ScheduledRule.parse("on"), ScheduledRule.parse("off"), ThresholdRule(90, 72, 16))
    rates = []
    for rule in (make_rule(scaled(CHAIN, 1.1, 0.95)), *fixed):
        bench = Bench(rule, accept=accept)
        bench.run(5000, running, 300 * running)
        rates.append(bench.tokens / bench.now_s)
    assert rates[0] >= 0.97 * max(rates[1:])


def test_the_report_says_what_the_decision_rests_on() -> None:
    bench = Bench(make_rule())
    bench.run(2 * SHARE_STEPS + 2, running=64, context_tokens=6400)
    report = bench.switch.snapshot()["estimates"]
    assert report["break_even"] == pytest.approx(0.01086 / 0.00676, rel=0.01)
    assert report["accept_length"] == pytest.approx(2.2, rel=0.01)
    assert report["accept_length_by_batch"] == {"64": pytest.approx(2.2, rel=0.01)}
    assert report["t_on_ms"] == pytest.approx(10.86, rel=0.01)
    assert report["slowness"] == {"on": {"64": pytest.approx(1.0, abs=0.01)}, "off": {}}
    assert make_rule().accept_max == ACCEPT_MAX
