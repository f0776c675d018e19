import pytest

from loadtest.pacing import ClosedLoop, Ramp

UP_AND_DOWN = Ramp(((0, 1), (10, 64), (20, 1)))


@pytest.mark.parametrize(
    ("elapsed_s", "level"), [(0, 1), (5, 32), (10, 64), (15, 32), (20, 1), (99, 1)]
)
def test_a_ramp_follows_straight_lines_and_keeps_its_last_level(
    elapsed_s: float, level: int
) -> None:
    assert UP_AND_DOWN.level(elapsed_s) == level


def test_a_step_changes_the_level_at_once() -> None:
    step = Ramp(((0, 1), (5, 1), (5, 64)))
    assert [step.level(at) for at in (4.999, 5.0)] == [1, 64]


@pytest.mark.parametrize("points", [(), ((1, 1), (0, 2)), ((0, -1),)])
def test_a_ramp_without_an_order_or_below_zero_is_refused(
    points: tuple[tuple[float, float], ...],
) -> None:
    with pytest.raises(ValueError, match="ramp"):
        Ramp(points)


def test_a_closed_loop_fills_free_places_with_requests_intended_now() -> None:
    loop = ClosedLoop(Ramp(((0, 4),)), requests=100)
    assert loop.due(2.5, started=10, in_flight=1) == (2.5, 2.5, 2.5)
    assert loop.due(2.5, started=10, in_flight=9) == ()


def test_a_closed_loop_starts_no_more_than_its_requests() -> None:
    loop = ClosedLoop(Ramp(((0, 8),)), requests=10)
    assert len(loop.due(0.0, started=7, in_flight=0)) == 3
    assert not loop.over(0.0, started=9)
    assert loop.over(0.0, started=10)


def test_a_closed_loop_starts_nothing_after_its_time() -> None:
    loop = ClosedLoop(Ramp(((0, 8),)), duration_s=5.0)
    assert loop.due(4.9, started=0, in_flight=0)
    assert not loop.due(5.0, started=0, in_flight=0)
    assert loop.over(5.0, started=0)


def test_a_closed_loop_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="duration"):
        ClosedLoop(Ramp(((0, 1),)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_shares_of_a_closed_loop_are_the_whole_of_it(count: int) -> None:
    whole = ClosedLoop(UP_AND_DOWN, requests=50)
    shares = [whole.share(index, count) for index in range(count)]
    assert sum(share.requests or 0 for share in shares) == 50
    for at in (0.0, 3.3, 10.0, 19.0):
        places = [len(share.due(at, started=0, in_flight=0)) for share in shares]
        assert sum(places) == min(UP_AND_DOWN.level(at), 50)
        assert max(places) - min(places) <= 1 or count > 50
