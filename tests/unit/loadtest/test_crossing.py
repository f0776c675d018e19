import pytest

from loadtest.crossing import Crossing, find, sentence


def curve(pairs: dict[int, float]) -> dict[float, float]:
    return {float(n): rate for n, rate in pairs.items()}


def test_curves_of_a_known_crossing_cross_there() -> None:
    """T = 4 + n and 10 + n / 2 milliseconds cross at 12, where no level is."""
    levels = (1, 2, 4, 8, 16, 32)
    found = find({n: n / (4 + n) for n in levels}, {n: n / (10 + n / 2) for n in levels})
    assert found is not None
    assert found.between == (8, 16)
    assert found.load == pytest.approx(12, rel=0.02)
    assert "cross at 12" in sentence(found)
    assert "spec is faster below" in sentence(found)


@pytest.mark.parametrize(("spec", "ahead"), [(2.0, "spec"), (0.5, "base")])
def test_a_server_that_is_ahead_everywhere_has_no_crossover(spec: float, ahead: str) -> None:
    found = find(curve({1: spec, 8: spec}), curve({1: 1.0, 8: 1.0}))
    assert found == Crossing(ahead)
    assert sentence(found, "a", "b").startswith(
        "No crossover: " + {"spec": "a", "base": "b"}[ahead]
    )


def test_levels_that_only_one_has_take_no_part() -> None:
    found = find(curve({1: 2.0, 4: 0.1, 8: 0.5}), curve({1: 1.0, 8: 1.0, 16: 9.0}))
    assert found is not None
    assert found.between == (1, 8)


def test_no_common_level_says_nothing() -> None:
    assert find(curve({1: 2.0}), curve({2: 1.0})) is None
    assert "nothing can be said" in sentence(None)


def test_several_crossings_are_counted() -> None:
    spec, base = curve({1: 0.9, 2: 2.0, 4: 0.5}), curve({1: 1.0, 2: 1.0, 4: 1.0})
    found = find(spec, base)
    assert found is not None
    assert (found.between, found.more) == ((2, 4), 1)
    assert "2 times in all" in sentence(found)


def test_curves_that_cross_from_base_to_spec_say_so() -> None:
    found = find(curve({1: 0.5, 2: 2.0}), curve({1: 1.0, 2: 1.0}))
    assert "base is faster below, spec above" in sentence(found)
