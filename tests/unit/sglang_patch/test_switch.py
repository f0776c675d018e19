import itertools
import json
import logging
import random
from collections.abc import Callable

import pytest

from sglang_patch.config import GOODPUT, Config
from sglang_patch.rule import SHARE_STEPS, Mode, ScheduledRule
from sglang_patch.switch import ARMED_STEPS_MAX, State, Switch
from tests.unit.sglang_patch.goodput_rig import make_rule

CONFIG = Config(disable_above=4, enable_at=3, dwell_steps=2)
GOODPUT_CONFIG = Config(None, None, policy=GOODPUT)


def ticking(step_s: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def decide(switch: Switch, running: int, forward: int = 0) -> Mode:
    return switch.decide(running, kv_free_tokens=10_000, kv_on_tokens=16, forward=forward)


def test_ranks_with_different_clocks_decide_alike() -> None:
    draw = random.Random(0)
    erratic = (draw.random() * 100 for _ in itertools.count())
    ranks = [
        Switch(CONFIG, clock=ticking(0.01), rank=0),
        Switch(CONFIG, clock=lambda: next(erratic), rank=1),
    ]
    sizes = [draw.randrange(1, 9) for _ in range(500)]
    decisions = [[decide(rank, size, step) for step, size in enumerate(sizes)] for rank in ranks]
    assert decisions[0] == decisions[1]
    assert {Mode.ON, Mode.OFF} == set(decisions[0])


def test_ranks_that_learn_from_different_clocks_decide_by_the_first_ones() -> None:
    """The second rank's own clock would have it switch off for good."""
    draw = random.Random(1)
    shared: list[object] = []

    def lead(learnt: object) -> object:
        shared.append(learnt)
        return learnt

    ranks = [
        Switch(GOODPUT_CONFIG, ticking(0.01), rank=0, share=lead),
        Switch(GOODPUT_CONFIG, lambda: draw.random() * 100, rank=1, share=lambda _: shared[-1]),
    ]
    for rank in ranks:
        rank.follow(make_rule())
    modes: list[list[Mode]] = [[], []]
    for step in range(20 * SHARE_STEPS):
        running = 1 + step // 50 % 256
        for rank, seen in zip(ranks, modes, strict=True):
            mode = decide(rank, running, step)
            seen.append(mode)
            drawn = 2 * running if rank.rank == 0 else draw.randrange(running, 5 * running)
            rank.finished(mode, running, drawn, graph_missed=False)
    assert modes[0] == modes[1]
    assert {Mode.ON, Mode.OFF} == set(modes[0])
    assert len(shared) == 20
    assert ranks[0].estimates() == ranks[1].estimates()


def test_without_sharing_these_ranks_would_differ() -> None:
    draw = random.Random(1)
    ranks = [
        Switch(GOODPUT_CONFIG, ticking(0.01)),
        Switch(GOODPUT_CONFIG, lambda: draw.random() * 100),
    ]
    for rank in ranks:
        rank.follow(make_rule())
    modes = [
        [decide(rank, 1 + step // 50 % 256, step) for step in range(20 * SHARE_STEPS)]
        for rank in ranks
    ]
    assert modes[0] != modes[1]


def test_another_rule_counts_anew() -> None:
    switch = Switch(CONFIG, clock=ticking(1))
    decide(switch, 9)
    assert switch.off
    switch.follow(make_rule())
    assert not switch.off
    assert switch.telemetry.steps == 0
    assert switch.estimates() is None


def test_becomes_active_when_the_worker_has_run() -> None:
    switch = Switch(CONFIG, clock=ticking(1))
    switch.seen_in_worker()
    assert switch.state is State.LOADED
    switch.arm()
    assert switch.snapshot()["state"] == "armed"
    switch.seen_in_worker()
    assert switch.snapshot()["state"] == "active"


def test_armed_for_long_is_a_loud_error(caplog: pytest.LogCaptureFixture) -> None:
    switch = Switch(CONFIG, clock=ticking(1))
    switch.arm()
    for step in range(ARMED_STEPS_MAX):
        decide(switch, 1, step)
    assert not switch.broken
    assert not caplog.records
    decide(switch, 1, ARMED_STEPS_MAX)
    assert switch.broken
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "NO EFFECT" in caplog.text


def test_an_active_switch_is_never_broken(caplog: pytest.LogCaptureFixture) -> None:
    switch = Switch(CONFIG, clock=ticking(1))
    switch.arm()
    switch.seen_in_worker()
    caplog.clear()
    for step in range(2 * ARMED_STEPS_MAX):
        decide(switch, 1, step)
    assert not switch.broken
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_times_only_steps_that_follow_one_another() -> None:
    switch = Switch(Config(4, 3, schedule=ScheduledRule.parse("off")), clock=ticking(0.5))
    for forward in (1, 2, 3, 9):  # a prefill ran between the last two
        decide(switch, 4, forward)
    off = switch.telemetry.modes[Mode.OFF]
    assert off.seconds == pytest.approx(1.0)
    assert off.step_s[4].count == 1  # the first one followed no step of its mode


def test_counts_switches_and_traces_each_step() -> None:
    lines: list[str] = []
    config = Config(4, 3, schedule=ScheduledRule.parse("every:2"))
    switch = Switch(config, clock=ticking(1), rank=1, trace=lines.append)
    for step in range(4):
        decide(switch, 2 + step, step)
    assert [json.loads(line) for line in lines] == [
        {"step": step, "rank": 1, "mode": mode, "batch": 2 + step}
        for step, mode in enumerate(["on", "on", "off", "off"])
    ]
    assert switch.snapshot()["switches_total"] == 1
    assert switch.snapshot()["off_share"] == 0.5


def test_leaving_out_the_draft_extend_ends_the_acceptance_figures() -> None:
    switch = Switch(Config(4, 3, skip_draft_extend=True), clock=ticking(1))
    switch.finished(Mode.ON, 2, 4, graph_missed=False)
    switch.finished(Mode.OFF, 2, 2, graph_missed=False)
    switch.finished(Mode.ON, 2, 2, graph_missed=False)
    assert switch.snapshot()["accept_length_on"] == 2.0
