"""A policy that takes another's place for a while."""

from router.core.override import Override, PolicyInForce
from router.core.policy import FixedPolicy, ThresholdPolicy, make_policy
from router.core.types import Decision, Reason, RequestShape, Role, ServerLoad

ONE = RequestShape()
IDLE = (ServerLoad("spec", Role.SPEC), ServerLoad("base", Role.BASE))
BUSY = (ServerLoad("spec", Role.SPEC, decode_sequences=50), ServerLoad("base", Role.BASE))


def chosen(policy: PolicyInForce, now: float, loads: tuple[ServerLoad, ...] = IDLE) -> Decision:
    return policy.choose(ONE, loads, loads, now)


def test_without_an_override_the_configured_policy_decides() -> None:
    policy = PolicyInForce(make_policy("threshold", threshold=8))
    assert chosen(policy, 0.0) == Decision("spec", Reason.BELOW_THRESHOLD)
    assert (policy.name, policy.mode) == ("threshold", Role.SPEC)
    assert policy.override(0.0) is None


def test_an_override_decides_says_so_and_ends_at_its_time_by_itself() -> None:
    policy = PolicyInForce(make_policy("threshold", threshold=8))
    policy.put(Override(FixedPolicy(Role.BASE), until=60.0))
    assert chosen(policy, 59.9) == Decision("base", Reason.OVERRIDE)
    assert (policy.name, policy.mode) == ("base-only", Role.BASE)
    assert chosen(policy, 60.0) == Decision("spec", Reason.BELOW_THRESHOLD)
    assert policy.name == "threshold"


def test_an_override_that_is_over_is_not_shown_though_no_request_came() -> None:
    policy = PolicyInForce(make_policy("spec-only"))
    policy.put(Override(FixedPolicy(Role.BASE), until=60.0))
    assert policy.override(59.0) is not None
    assert policy.override(61.0) is None
    assert policy.name == "spec-only"


def test_having_had_no_choice_stays_the_reason_under_an_override() -> None:
    policy = PolicyInForce(make_policy("spec-only"))
    policy.put(Override(FixedPolicy(Role.BASE), until=60.0))
    decision = policy.choose(ONE, IDLE[:1], IDLE, 0.0)
    assert decision == Decision("spec", Reason.ONLY_SERVER)


def test_it_can_be_undone_before_its_time_and_a_later_one_takes_its_place() -> None:
    policy = PolicyInForce(make_policy("spec-only"))
    assert not policy.restore()
    policy.put(Override(FixedPolicy(Role.BASE), until=60.0))
    policy.put(Override(make_policy("least-inflight"), until=600.0))
    assert chosen(policy, 100.0).reason is Reason.OVERRIDE
    assert policy.name == "least-inflight"
    assert policy.restore()
    assert chosen(policy, 100.0) == Decision("spec", Reason.FIXED)


def test_what_is_configured_anew_waits_for_the_override_to_end() -> None:
    policy = PolicyInForce(make_policy("spec-only"))
    policy.put(Override(FixedPolicy(Role.BASE), until=60.0))
    policy.configure(make_policy("least-inflight"))
    assert chosen(policy, 0.0).server == "base"
    assert chosen(policy, 60.0).reason is Reason.LEAST_INFLIGHT


def test_switches_are_never_counted_back() -> None:
    def moved() -> ThresholdPolicy:
        made = ThresholdPolicy(8, None, 0.0)
        made.choose(ONE, IDLE, IDLE, 0.0)
        made.choose(ONE, BUSY, BUSY, 1.0)
        return made

    policy = PolicyInForce(moved())
    assert policy.switches == 1
    policy.put(Override(moved(), until=60.0))
    assert policy.switches == 2
    policy.restore()
    assert policy.switches == 2
    policy.configure(make_policy("spec-only"))
    assert policy.switches == 2
