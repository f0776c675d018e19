from collections.abc import Callable

import pytest

from router.core.health import HealthState, ServerHealth

_Step = Callable[[ServerHealth, float], bool]


def ok(health: ServerHealth, now: float) -> bool:
    return health.probe_ok(now)


def fail(health: ServerHealth, now: float) -> bool:
    return health.probe_failed(now, "probe timed out")


def error(health: ServerHealth, now: float) -> bool:
    return health.transport_error(now, "connection refused")


def token(health: ServerHealth, now: float) -> bool:
    return health.token(now)


UNKNOWN, UP = HealthState.UNKNOWN, HealthState.UP
UNRESPONSIVE, UNREACHABLE = HealthState.UNRESPONSIVE, HealthState.UNREACHABLE


def chunk(health: ServerHealth, now: float) -> bool:
    """Take note of a chunk as the relay does: the call of `token` comes later."""
    health.last_token_at = now
    return False


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([], UNKNOWN),
        ([(ok, 0)], UP),
        ([(fail, 0), (fail, 5), (fail, 10), (fail, 15)], UNKNOWN),
        ([(error, 0), (error, 1), (error, 2)], UNKNOWN),
        ([(fail, 0), (ok, 5)], UP),
        ([(ok, 0), (fail, 5), (fail, 10)], UP),
        ([(ok, 0), (fail, 5), (fail, 10), (fail, 15)], UNRESPONSIVE),
        ([(ok, 0), (fail, 5), (fail, 10), (ok, 15), (fail, 20), (fail, 25)], UP),
        ([(ok, 0), (fail, 5), (fail, 10), (fail, 15), (ok, 20)], UP),
        # Data that flows outweighs probes, for the grace time (30 s), and starts their row anew.
        ([(ok, 0), (token, 4), (fail, 5), (fail, 15), (fail, 25), (fail, 34)], UP),
        ([(ok, 0), (token, 4), (fail, 35), (fail, 45), (fail, 55)], UNRESPONSIVE),
        ([(ok, 0), (fail, 5), (fail, 10), (token, 11), (fail, 12), (fail, 42), (fail, 52)], UP),
        ([(ok, 0), (fail, 5), (fail, 10), (fail, 15), (token, 16)], UP),
        # One broken connection may be a stale one; two within the window (10 s) are not.
        ([(ok, 0), (error, 1)], UP),
        ([(ok, 0), (error, 1), (error, 2)], UNREACHABLE),
        ([(ok, 0), (error, 1), (error, 12)], UP),
        ([(ok, 0), (error, 1), (error, 12), (error, 13)], UNREACHABLE),
        ([(ok, 0), (error, 1), (token, 2), (error, 3)], UP),
        ([(ok, 0), (error, 1), (chunk, 2), (error, 3)], UP),
        (
            [(ok, 0), (error, 1), (lambda health, _: health.token(0.9), 1.5), (error, 2)],
            UNREACHABLE,
        ),
        ([(ok, 0), (error, 1), (ok, 2), (error, 3)], UP),
        ([(ok, 0), (error, 1), (error, 2), (ok, 3)], UP),
        # A dead server's last bytes do not bring it back, nor do its failing probes make it better.
        ([(ok, 0), (error, 1), (error, 2), (token, 3)], UNREACHABLE),
        ([(ok, 0), (error, 1), (error, 2), (fail, 40), (fail, 50), (fail, 60)], UNREACHABLE),
        ([(ok, 0), (fail, 5), (fail, 10), (fail, 15), (error, 16), (error, 17)], UNREACHABLE),
    ],
)
def test_state_after(steps: list[tuple[_Step, float]], state: HealthState) -> None:
    health = ServerHealth()
    for step, now in steps:
        before = health.state
        assert step(health, now) is (health.state is not before)
        if health.state is not before:
            assert health.since == now
    assert health.state is state
    assert health.up is (state is UP)


def test_the_last_error_is_kept() -> None:
    health = ServerHealth()
    fail(health, 0)
    assert health.last_error == "probe timed out"
    error(health, 1)
    assert health.last_error == "connection refused"
    ok(health, 2)
    assert health.last_error == "connection refused"


def test_limits_can_be_set() -> None:
    health = ServerHealth(failed_probes_max=1, transport_errors_max=1)
    ok(health, 0)
    assert fail(health, 1)
    assert error(health, 2)
    assert health.state is UNREACHABLE


@pytest.mark.parametrize(
    ("steps", "returned_at"),
    [
        # Up before the router was: nothing is known of a start.
        ([(ok, 1)], None),
        ([(fail, 1), (ok, 2)], 2),
        ([(error, 1), (ok, 2)], 2),
        ([(ok, 1), (error, 2), (error, 3), (ok, 4)], 4),
        # Late answers are no absence.
        ([(ok, 1), (fail, 5), (fail, 10), (fail, 15), (ok, 20)], None),
        ([(ok, 1), (error, 2), (ok, 3)], None),
    ],
)
def test_a_server_has_returned_if_it_was_away(
    steps: list[tuple[_Step, float]], returned_at: float | None
) -> None:
    health = ServerHealth()
    for step, now in steps:
        step(health, now)
    assert health.returned_at == returned_at


def test_a_server_that_has_returned_is_warm_in_the_end() -> None:
    health = ServerHealth(returned_at=100.0)
    assert not health.is_cold(4, 100.0, 10.0)
    assert health.is_cold(5, 100.0, 10.0)
    assert health.is_cold(23, 105.0, 10.0)
    assert not health.is_cold(22, 105.0, 10.0)
    assert not health.is_cold(10**6, 110.0, 10.0)
    assert not ServerHealth().is_cold(10**6, 100.0, 10.0)
