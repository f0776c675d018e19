"""Oracles against brute force, and the rival that knows the curves."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.virtual.curves import Curve, best_single_tok_s, best_split
from loadtest.virtual.rivals import KnownCurves, RoundRobin, concave, summed_growth_s
from router.core.types import RequestShape, Role, ServerLoad

RISING = Curve((1, 8, 64), (200.0, 1500.0, 8000.0))
EARLY = Curve((1, 8, 64), (280.0, 2200.0, 3400.0))
rates = st.lists(st.floats(1.0, 1e4), min_size=2, max_size=40)


def test_a_curve_holds_its_points_and_is_linear_in_time_per_token_between_them() -> None:
    assert RISING.table_tok_s[8] == pytest.approx(1500.0)
    between_s = 8 / 1500 + (64 / 8000 - 8 / 1500) * (36 - 8) / (64 - 8)
    assert RISING.table_s[36] == pytest.approx(between_s)
    beyond_s = 64 / 8000 + (64 / 8000 - 8 / 1500) * (120 - 64) / (64 - 8)
    assert RISING.table_s[120] == pytest.approx(beyond_s)
    assert RISING.table_tok_s[0] == 0.0


def test_a_slower_server_takes_longer_at_every_level() -> None:
    slower = RISING.scaled(1.8)
    assert slower.table_s[40] == pytest.approx(1.8 * RISING.table_s[40])


@pytest.mark.parametrize("n", [1, 2, 7, 30, 200])
def test_the_best_split_is_the_best_of_all_splits(n: int) -> None:
    on_spec, tok_s = best_split(EARLY, RISING, n)
    every = [EARLY.table_tok_s[k] + RISING.table_tok_s[n - k] for k in range(n + 1)]
    assert tok_s == max(every) == every[on_spec]
    assert best_single_tok_s((EARLY, RISING), n) == max(every[0], every[-1]) <= tok_s


@given(rates)
def test_the_concave_hull_is_concave_and_nowhere_below(values: list[float]) -> None:
    steps = [0.0, *values]
    hull = concave(steps)
    assert all(h >= value - 1e-6 for h, value in zip(hull, steps, strict=True))
    gains = [after - before for before, after in pairwise(hull)]
    assert all(after <= before + 1e-6 for before, after in pairwise(gains))


@given(rates)
def test_every_point_of_the_concave_hull_lies_on_a_line_between_two_values(
    values: list[float],
) -> None:
    steps = [0.0, *values]
    for n, height in enumerate(concave(steps)):
        highest = max(
            steps[a] + (steps[b] - steps[a]) * (n - a) / (b - a) if b > a else steps[n]
            for a in range(n + 1)
            for b in range(n, len(steps))
        )
        assert height == pytest.approx(highest)


def test_known_curves_fill_the_servers_as_the_least_sum_of_times_wants() -> None:
    loads = {"spec": 0, "base": 0}
    policy = KnownCurves([(0.0, {"spec": EARLY, "base": RISING})])
    for _ in range(40):
        seen = [ServerLoad(name, Role(name), decode_sequences=n) for name, n in loads.items()]
        loads[policy.choose(RequestShape(), seen, seen, 1.0).server] += 1
    growth = {"spec": summed_growth_s(EARLY), "base": summed_growth_s(RISING)}

    def summed_s(on_spec: int) -> float:
        return sum(growth["spec"][:on_spec]) + sum(growth["base"][: 40 - on_spec])

    assert summed_s(loads["spec"]) == pytest.approx(min(summed_s(k) for k in range(41)), rel=0.01)


def test_known_curves_change_with_the_time() -> None:
    slow = {"spec": EARLY.scaled(5.0), "base": RISING}
    policy = KnownCurves([(-1.0, {"spec": EARLY, "base": RISING}), (10.0, slow)])
    idle = [ServerLoad("spec", Role.SPEC), ServerLoad("base", Role.BASE)]
    chosen = [policy.choose(RequestShape(), idle, idle, now).server for now in (9.9, 10.1)]
    assert chosen == ["spec", "base"]


def test_round_robin_takes_turns() -> None:
    idle = [ServerLoad("spec", Role.SPEC), ServerLoad("base", Role.BASE)]
    policy = RoundRobin()
    chosen = [policy.choose(RequestShape(), idle, idle, 0.0).server for _ in range(4)]
    assert chosen[:2] == chosen[2:]
    assert set(chosen) == {"spec", "base"}
