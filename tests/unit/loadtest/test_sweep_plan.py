from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sweep_plan import DRIFT_SHARE_MAX, Drift, Visit, plan, reference_of

TARGETS = ("spec", "base", "router")
LEVELS = (1, 2, 4, 8)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))
def test_every_round_measures_every_target_at_every_level_once(
    targets: int, levels: int, rounds: int
) -> None:
    names, steps = TARGETS[:targets], tuple(2**n for n in range(levels))
    visits = plan(names, steps, rounds)
    measured = Counter(visit for visit in visits if visit.round is not None)
    assert measured == {Visit(t, n, r): 1 for t in names for n in steps for r in range(rounds)}
    assert visits.count(reference_of(names, steps)) == rounds + 1


@pytest.mark.parametrize("names", [TARGETS[:2], TARGETS])
@pytest.mark.parametrize("levels", [LEVELS, LEVELS[:3]])
def test_at_every_level_every_target_goes_first_in_one_round(
    names: tuple[str, ...], levels: tuple[int, ...]
) -> None:
    visits = plan(names, levels, len(names))
    for level in levels:
        firsts = {
            next(v.target for v in visits if (v.concurrency, v.round) == (level, number))
            for number in range(len(names))
        }
        assert firsts == set(names)


def test_targets_of_a_level_follow_one_another() -> None:
    visits = [v for v in plan(TARGETS, LEVELS, 2) if v.round is not None]
    for at in range(0, len(visits), len(TARGETS)):
        assert len({v.concurrency for v in visits[at : at + len(TARGETS)]}) == 1


@pytest.mark.parametrize(
    ("rates", "moved"),
    [((), False), ((100.0,), False), ((100.0, 101.0, 99.0), False), ((100.0, 96.0), True)],
)
def test_a_reference_that_moved_by_more_than_a_sweep_bears_is_a_drift(
    rates: tuple[float, ...], moved: bool
) -> None:
    drift = Drift(Visit("spec", 4, None), rates)
    assert drift.moved is moved
    assert drift.to_json()["moved"] is moved
    assert (drift.moved_share or 0.0) <= DRIFT_SHARE_MAX or moved
