import pytest

from loadtest.shape import parse_shape


@pytest.mark.parametrize(
    ("text", "points", "duration_s"),
    [
        ("16", ((0, 16),), None),
        ("2.5", ((0, 2.5),), None),
        ("8/30", ((0, 8), (30, 8)), 30),
        ("1..64/60", ((0, 1), (60, 64)), 60),
        ("0.5..2/4", ((0, 0.5), (4, 2)), 4),
        ("1/20, 64/20,1/20", ((0, 1), (20, 1), (20, 64), (40, 64), (40, 1), (60, 1)), 60),
        ("0/5,3", ((0, 0), (5, 0), (5, 3)), None),
    ],
)
def test_a_shape_is_a_level_a_ramp_or_pieces_of_both(
    text: str, points: tuple[tuple[float, float], ...], duration_s: float | None
) -> None:
    shape = parse_shape(text, high=100)
    assert shape.ramp.points == points
    assert shape.duration_s == duration_s


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1..5", "1,2/5", "0", "101", "5/0", "1e9", "1..2..3/4", "0/5", "..", "."],
)
def test_what_is_no_shape_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"LEVEL|number|within"):
        parse_shape(text, high=100)


def test_the_highest_level_is_known() -> None:
    assert parse_shape("1/20,64/20,1/20", high=100).highest == 64
