"""The choice on shared GPUs: what misleads it, and that it comes back."""

import pytest

from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.types import Layout, Role
from tests.unit.core.steered import Curve, Steered, line

# Speculation is the faster up to 95 sequences.
_SPEC, _BASE = line(3, 0.08), line(4.9, 0.06)
_LOADS = (1, 8, 32, 64, 128)
# A router's clock is that of its host, which has been up for days.
_UP_S = 500_000.0


def calibration(spec: Curve = _SPEC, base: Curve = _BASE) -> Calibration:
    def profile(role: Role, curve: Curve) -> ServerProfile:
        points = tuple(TpotPoint(n, curve(n), curve(n), curve(n), 2) for n in _LOADS)
        return ServerProfile(role, tpot=points)

    return Calibration((profile(Role.SPEC, spec), profile(Role.BASE, base)))


def steered(given: Calibration | None = None) -> Steered:
    node = Steered(
        {"spec": _SPEC, "base": _BASE},
        declared=Layout.SHARED,
        shared=True,
        calibration=given or calibration(),
    )
    node.now = _UP_S
    return node


def in_charge(node: Steered) -> Role | None:
    return node.policy.mode


def left_while_slow(seconds: float) -> Steered:
    """A node whose spec server was slow for so long, and is itself again."""
    node = steered()
    node.run(8, 20)
    node.curves["spec"] = lambda n: 2.5 * _SPEC(n)
    node.run(8, seconds)
    node.curves["spec"] = _SPEC
    return node


def test_a_role_that_is_slow_for_a_few_seconds_stays_in_charge() -> None:
    node = left_while_slow(4)
    node.run(8, 60)
    assert in_charge(node) is Role.SPEC
    assert node.policy.switches == 0


def test_a_role_that_was_left_for_good_reason_is_back_two_minutes_after_it_recovers() -> None:
    node = left_while_slow(20)
    assert in_charge(node) is Role.BASE
    node.run(8, 120)
    assert in_charge(node) is Role.SPEC
    node.run(8, 60)
    assert node.policy.switches == 2


def test_what_is_believed_of_the_idle_role_returns_to_its_calibration() -> None:
    node = left_while_slow(20)
    believed = node.learner.tpot_s("spec", 8)
    assert believed is not None
    assert believed.value > 2 * _SPEC(8)
    node.run(8, 240)
    for n in _LOADS:
        believed = node.learner.tpot_s("spec", n)
        assert believed is not None
        assert believed.value == pytest.approx(_SPEC(n), rel=0.1)


def test_an_idle_role_whose_belief_was_corrupted_gets_its_load_all_the_same() -> None:
    node = steered()
    node.run(128, 90)
    assert in_charge(node) is Role.BASE
    spec = node.learner.servers["spec"].on
    for turn in range(8):
        spec.observe(node.now + turn / 4, 8, 2.5 * _SPEC(8), 0.25)
    assert spec.changes == 1
    node.run(8, 120)
    assert in_charge(node) is Role.SPEC


def test_a_role_that_stays_slow_is_tried_again_ever_more_rarely() -> None:
    node = steered()
    node.curves["spec"] = lambda n: 1.8 * _SPEC(n)
    node.run(8, 400)
    switches = node.policy.switches
    assert switches <= 5
    node.run(8, 800)
    assert node.policy.switches <= switches + 4


def test_a_wrong_calibration_gives_way_for_good() -> None:
    node = steered(calibration(spec=lambda n: 0.5 * _SPEC(n)))
    node.curves["spec"] = lambda n: 1.8 * _SPEC(n)
    node.run(8, 300)
    assert in_charge(node) is Role.BASE
    assert node.policy.switches <= 3


@pytest.mark.parametrize("level", [1, 8, 32, 64])
def test_a_calibration_of_few_windows_is_not_forgotten_for_the_age_of_the_clock(level: int) -> None:
    node = steered()
    node.run(8, 1)
    believed = node.learner.tpot_s("base", level)
    assert believed is not None
    spec = node.learner.servers["spec"].on
    assert spec.weight(32) == pytest.approx(2, rel=0.1)
    assert believed.value == pytest.approx(_BASE(level), rel=0.05)


class TestTrial:
    """From nothing: half of the load shows what a change would be worth."""

    def cold(self, spec: Curve, base: Curve) -> Steered:
        return Steered({"spec": spec, "base": base}, declared=Layout.SHARED, shared=True)

    def test_a_trial_that_is_lost_is_no_change(self) -> None:
        node = self.cold(spec=line(4, 0.4), base=line(7, 0.1))
        node.run(40, 60)
        assert node.requests["spec"] > 0
        assert node.policy.switches == 0
        before = node.requests["spec"]
        node.run(40, 60)
        assert node.requests["spec"] == before

    @pytest.mark.parametrize("clients", [1, 8, 40])
    def test_a_trial_that_is_won_is_one_change(self, clients: int) -> None:
        node = self.cold(spec=_SPEC, base=_BASE)
        node.run(clients, 60)
        assert in_charge(node) is Role.SPEC
        assert node.policy.switches == 1

    def test_a_trial_leaves_half_of_the_load_where_it_was(self) -> None:
        node = self.cold(spec=_SPEC, base=_BASE)
        moved = [0]
        while in_charge(node) is Role.BASE and node.now < 60:
            moved.append(node.ledger.load("spec").sequences)
            node.run(32, 0.25)
        assert in_charge(node) is Role.SPEC
        assert max(moved) == 16

    def test_it_never_changes_twice_within_a_minute(self) -> None:
        # Faster at half of the load, slower with all of it: what a trial cannot see.
        node = self.cold(spec=line(2, 0.25), base=line(7, 0.05))
        changes = []
        for _ in range(1200):
            switches = node.policy.switches
            node.run(36, 0.25)
            if node.policy.switches > switches:
                changes.append(node.now)
        assert in_charge(node) is Role.BASE
        assert len(changes) == 2
        assert changes[1] - changes[0] >= 60
