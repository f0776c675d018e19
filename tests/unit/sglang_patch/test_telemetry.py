import pytest

from sglang_patch.estimates import bucket
from sglang_patch.rule import Mode
from sglang_patch.telemetry import Telemetry


@pytest.mark.parametrize(
    ("running", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (256, 256)]
)
def test_batch_sizes_fall_into_powers_of_two(running: int, expected: int) -> None:
    assert bucket(running) == expected


def test_before_the_first_step_figures_are_unknown_not_zero_divisions() -> None:
    figures = Telemetry().summary(1)
    assert figures["off_share"] == 0.0
    assert figures["accept_length_on"] is None
    assert figures["t_on_ms"] is None


def test_acceptance_leaves_off_steps_out() -> None:
    telemetry = Telemetry()
    for mode, tokens in ((Mode.ON, 8), (Mode.OFF, 4), (Mode.OFF, 4), (Mode.ON, 12)):
        telemetry.finished(mode, running=4, tokens=tokens, graph_missed=False)
    assert telemetry.summary(4)["accept_length_on"] == pytest.approx(2.5)
    assert telemetry.summary(4)["tokens"] == {"on": 20, "off": 8}


def test_acceptance_of_a_stale_draft_does_not_count() -> None:
    telemetry = Telemetry(draft_stale=True)
    telemetry.finished(Mode.ON, running=4, tokens=4, graph_missed=False)
    assert telemetry.accept.value is None


def test_step_times_hold_steady_steps_and_no_stalls() -> None:
    telemetry = Telemetry()
    assert telemetry.timed(Mode.ON, 8, 0.010, steady=True)
    assert not telemetry.timed(Mode.ON, 8, 0.050, steady=False)
    assert not telemetry.timed(Mode.ON, 8, 1.0, steady=True)
    assert telemetry.table() == {"on": {"8": 10.0}, "off": {}}
    assert telemetry.modes[Mode.ON].seconds == pytest.approx(1.06)


def test_step_time_at_a_size_not_seen_is_that_of_the_nearest() -> None:
    telemetry = Telemetry()
    telemetry.timed(Mode.OFF, 8, 0.008, steady=True)
    telemetry.timed(Mode.OFF, 64, 0.064, steady=True)
    assert telemetry.step_ms(Mode.OFF, 16) == pytest.approx(8.0)
    assert telemetry.step_ms(Mode.OFF, 200) == pytest.approx(64.0)
    assert telemetry.step_ms(Mode.OFF) == pytest.approx(36.0)


def test_graph_misses_are_counted_by_mode() -> None:
    telemetry = Telemetry()
    telemetry.finished(Mode.OFF, running=300, tokens=300, graph_missed=True)
    telemetry.finished(Mode.ON, running=1, tokens=2, graph_missed=False)
    assert telemetry.summary(1)["graph_misses"] == {"on": 0, "off": 1}
