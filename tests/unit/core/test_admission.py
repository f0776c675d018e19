import pytest

from router.core.admission import Lifetime, Limits, Line, Priority, Room
from router.core.types import RequestShape, Role, ServerLoad

INTERACTIVE, BATCH = Priority.INTERACTIVE, Priority.BATCH


def load(name: str, sequences: int, prefill_tokens: int = 0) -> ServerLoad:
    return ServerLoad(name, Role.SPEC, 0, sequences, prefill_tokens)


def names(limits: Limits, shape: RequestShape, *loads: ServerLoad) -> list[str]:
    return [each.name for each in limits.with_room(shape, loads, loads)]


@pytest.mark.parametrize(
    ("room", "shape", "fits"),
    [
        (Room(), RequestShape(10**6, 10**9), True),
        (Room(sequences=8), RequestShape(3), True),
        (Room(sequences=8), RequestShape(4), False),
        (Room(prefill_tokens=1000), RequestShape(1, 500), True),
        (Room(prefill_tokens=1000), RequestShape(1, 501), False),
    ],
)
def test_a_request_fits_up_to_the_limit(room: Room, shape: RequestShape, fits: bool) -> None:
    assert room.holds(shape, 5, 500) is fits


def test_what_is_larger_than_the_limit_fits_beside_nothing() -> None:
    room = Room(sequences=8, prefill_tokens=1000)
    assert room.holds(RequestShape(9, 2000), 0, 0)
    assert not room.holds(RequestShape(9, 10), 1, 0)
    assert not room.holds(RequestShape(1, 2000), 1, 10)


def test_each_server_has_its_own_room() -> None:
    limits = Limits(each=Room(4), of={"b": Room(2)})
    assert names(limits, RequestShape(), load("a", 3), load("b", 2)) == ["a"]
    assert names(limits, RequestShape(), load("a", 4), load("b", 1)) == ["b"]


def test_a_full_total_leaves_no_server() -> None:
    limits = Limits(total=Room(sequences=6))
    assert names(limits, RequestShape(), load("a", 3), load("b", 2)) == ["a", "b"]
    assert names(limits, RequestShape(), load("a", 3), load("b", 3)) == []
    limits = Limits(total=Room(prefill_tokens=100))
    assert names(limits, RequestShape(1, 60), load("a", 1, 30), load("b", 1, 20)) == []


def test_what_asks_for_no_sequence_always_fits() -> None:
    limits = Limits(total=Room(sequences=1))
    assert names(limits, RequestShape(0), load("a", 5)) == ["a"]


def test_limits_without_a_figure_are_endless() -> None:
    assert Limits().endless
    assert not Limits(of={"a": Room(1)}).endless


def line(*items: tuple[str, Priority], size_max: int = 9) -> Line[str]:
    made: Line[str] = Line(size_max)
    for at, (item, priority) in enumerate(items):
        assert made.join(item, priority, 2, float(at)) is None
    return made


def test_interactive_goes_before_batch_and_each_in_its_order() -> None:
    made = line(("b1", BATCH), ("i1", INTERACTIVE), ("b2", BATCH), ("i2", INTERACTIVE))
    assert made.first(9) == ["i1", "i2", "b1", "b2"]
    assert made.head() == "i1"


def test_a_full_line_sheds_the_latest_batch_for_an_interactive_one() -> None:
    made = line(("b1", BATCH), ("b2", BATCH), size_max=2)
    assert made.join("i1", INTERACTIVE, 1, 9.0) == "b2"
    assert made.join("i2", INTERACTIVE, 1, 9.0) == "b1"
    assert made.first(9) == ["i1", "i2"]


@pytest.mark.parametrize("priority", Priority)
def test_a_full_line_refuses_who_nobody_makes_place_for(priority: Priority) -> None:
    made = line(("i1", INTERACTIVE), size_max=1)
    assert made.join("new", priority, 1, 9.0) == "new"
    assert made.first(9) == ["i1"]
    assert Line[str](0).join("new", priority, 1, 9.0) == "new"


def test_batch_does_not_push_batch_out() -> None:
    made = line(("b1", BATCH), size_max=1)
    assert made.join("b2", BATCH, 1, 9.0) == "b2"


def test_a_newcomer_waits_behind_its_class_and_those_before_it() -> None:
    assert not line().holds_back(BATCH)
    assert not line(("b", BATCH)).holds_back(INTERACTIVE)
    assert line(("b", BATCH)).holds_back(BATCH)
    assert line(("i", INTERACTIVE)).holds_back(INTERACTIVE)
    assert line(("i", INTERACTIVE)).holds_back(BATCH)


def test_sequences_before_a_newcomer_are_those_of_who_goes_first() -> None:
    made = line(("b", BATCH), ("i", INTERACTIVE), ("j", INTERACTIVE))
    assert made.sequences_before(INTERACTIVE) == 4
    assert made.sequences_before(BATCH) == 6
    made.leave("i")
    assert made.sequences_before(INTERACTIVE) == 2


def test_those_that_came_before_a_time_are_overdue() -> None:
    made = line(("b1", BATCH), ("i1", INTERACTIVE), ("b2", BATCH), ("i2", INTERACTIVE))
    assert made.overdue(2.0) == ["i1", "b1"]
    assert len(made) == 4


def lifetime(sequence_s: float, ended: int) -> Lifetime:
    made = Lifetime()
    made.observe(10.0, sequence_s, ended)
    return made


@pytest.mark.parametrize(
    ("sequence_s", "ended", "before", "in_flight", "seconds"),
    [
        (400.0, 100, 39, 20, 8),  # 40 places at one every 4 s / 20
        (400.0, 100, 0, 20, 1),  # never less than one
        (400.0, 100, 10**6, 20, 120),  # nor more than clients wait for
        (300.0, 0, 0, 30, 10),  # none has ended: it takes at least what was seen
        (0.0, 0, 5, 0, 1),  # nothing is known
    ],
)
def test_retry_after_is_the_time_until_those_before_have_begun(
    sequence_s: float, ended: int, before: int, in_flight: int, seconds: int
) -> None:
    assert lifetime(sequence_s, ended).retry_after_s(before, in_flight) == seconds


def test_a_lifetime_follows_what_has_changed() -> None:
    made = lifetime(400.0, 100)
    for at in range(1, 20):
        made.observe(10.0 + 10 * at, 400.0 + 1000.0 * at, 100 + 10 * at)
    # Now 100 s a sequence: 10 places at one every 100 s / 100.
    assert made.retry_after_s(9, 100) == 10
