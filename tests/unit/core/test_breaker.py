from collections.abc import Callable

import pytest

from router.core.breaker import Breaker, BreakerState, Verdict

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SUCCESS, FAILURE, NEUTRAL = Verdict.SUCCESS, Verdict.FAILURE, Verdict.NEUTRAL


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(failures_max=1)
    assert breaker.end(FAILURE, at, trial=False)
    return breaker


def on_trial() -> Breaker:
    breaker = opened()
    assert breaker.tick(5.0)
    assert breaker.begin()
    return breaker


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        ([FAILURE] * 4, CLOSED),
        ([FAILURE] * 5, OPEN),
        ([FAILURE] * 4 + [SUCCESS] + [FAILURE] * 4, CLOSED),
        ([FAILURE] * 4 + [NEUTRAL] * 9 + [FAILURE], OPEN),
        ([NEUTRAL] * 99, CLOSED),
    ],
)
def test_it_opens_at_so_many_failures_in_a_row(verdicts: list[Verdict], state: object) -> None:
    breaker = Breaker()
    for verdict in verdicts:
        before = breaker.state
        assert breaker.end(verdict, 1.0, trial=False) is (breaker.state is not before)
    assert breaker.state is state
    assert breaker.admits is (state is CLOSED)


def test_failures_far_apart_are_no_row() -> None:
    breaker = Breaker(failures_max=2, window_s=30.0)
    breaker.end(FAILURE, 0.0, trial=False)
    assert not breaker.end(FAILURE, 31.0, trial=False)
    assert breaker.end(FAILURE, 60.0, trial=False)


def test_without_a_limit_it_never_opens() -> None:
    breaker = Breaker(failures_max=0)
    assert not any(breaker.end(FAILURE, 1.0, trial=False) for _ in range(100))


def test_one_that_is_turned_off_closes_whatever_its_state() -> None:
    for breaker in (opened(), on_trial()):
        breaker.failures_max = 0
        assert breaker.tick(0.1)
        assert breaker.state is CLOSED
        assert breaker.admits
        assert not breaker.tick(0.2)


def test_a_trial_that_fails_after_it_was_turned_off_opens_nothing() -> None:
    breaker = on_trial()
    breaker.failures_max = 0
    assert breaker.end(FAILURE, 6.0, trial=True)
    assert breaker.state is CLOSED
    assert breaker.admits
    breaker = on_trial()
    breaker.failures_max = 0
    assert breaker.tick(5.5)
    assert not breaker.end(FAILURE, 6.0, trial=True)
    assert breaker.state is CLOSED
    assert breaker.admits


def test_it_tries_one_request_once_its_time_is_over() -> None:
    breaker = opened(at=10.0)
    assert not breaker.tick(14.9)
    assert not breaker.admits
    assert breaker.tick(15.0)
    assert not breaker.tick(16.0)
    assert breaker.admits
    assert breaker.begin()
    assert not breaker.admits
    assert not breaker.begin()


def test_a_good_trial_closes_it() -> None:
    breaker = on_trial()
    assert breaker.end(SUCCESS, 6.0, trial=True)
    assert breaker.state is CLOSED
    assert breaker.admits


def test_each_bad_trial_doubles_the_pause_up_to_a_limit() -> None:
    breaker = opened()
    now, pauses = 0.0, [breaker.opened_s]
    for _ in range(6):
        now += breaker.opened_s
        assert breaker.tick(now)
        assert breaker.begin()
        assert breaker.end(FAILURE, now, trial=True)
        pauses.append(breaker.opened_s)
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    assert breaker.opened_total == 7


def test_a_trial_that_says_nothing_is_followed_by_another() -> None:
    breaker = on_trial()
    assert not breaker.end(NEUTRAL, 6.0, trial=True)
    assert breaker.state is HALF_OPEN
    assert breaker.begin()


@pytest.mark.parametrize("make", [opened, on_trial])
@pytest.mark.parametrize("verdict", Verdict)
def test_while_it_is_not_closed_only_the_trial_counts(
    make: Callable[[], Breaker], verdict: Verdict
) -> None:
    breaker = make()
    before = breaker.state
    assert not breaker.end(verdict, 4.0, trial=False)
    assert breaker.state is before
