import pytest

from router.core.regret import Regret


def spec(n: float) -> float:
    return 100 * min(n, 4)


def base(n: float) -> float:
    return 50 * min(n, 16)


def test_nothing_is_known_before_any_work() -> None:
    regret = Regret()
    regret.add(1.0, 0, 0.0, spec, base)
    assert regret.shares() == {"o1": None, "o2": None, "o3": None}


def test_the_oracles_at_one_load() -> None:
    regret = Regret()
    regret.add(2.0, 8, 900.0, spec, base)
    # Alone spec makes 400 and base 400 a second; 4 and 4 make 600, which K = 4 does as well.
    assert regret.oracle_tokens() == {"o1": 800.0, "o2": 1200.0, "o3": 1200.0}
    assert regret.best_threshold == 4
    assert regret.shares() == {
        "o1": pytest.approx(-0.125),
        "o2": pytest.approx(0.25),
        "o3": pytest.approx(0.25),
    }


def test_the_fixed_rule_has_one_threshold_for_the_whole_run() -> None:
    def slow_start(n: float) -> float:
        return 10 * n if n < 8 else 100 * n

    regret = Regret()
    for load in (4, 16):
        regret.add(1.0, load, 0.0, slow_start, base)
    oracles = regret.oracle_tokens()
    assert oracles["o2"] < oracles["o3"] == 200 + 1600


def test_splits_on_shared_gpus_pay_for_the_contention() -> None:
    regret = Regret()
    regret.add(1.0, 8, 0.0, spec, base, slowdown=2.0)
    assert regret.oracle_tokens()["o3"] == 400.0


def test_many_sequences_are_split_in_few_steps_but_well() -> None:
    regret = Regret()
    regret.add(1.0, 500, 0.0, spec, base)
    assert regret.oracle_tokens()["o3"] == 1200.0
