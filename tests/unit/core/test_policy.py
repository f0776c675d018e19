import pytest

from router.core.policy import POLICIES, make_policy
from router.core.types import Decision, Policy, Reason, RequestShape, Role, ServerLoad

_ONE = RequestShape()


def spec(n: int, name: str = "eagle", prefill_tokens: int = 0) -> ServerLoad:
    return ServerLoad(name, Role.SPEC, decode_sequences=n, prefill_tokens=prefill_tokens)


def base(n: int, name: str = "plain", prefill_tokens: int = 0) -> ServerLoad:
    return ServerLoad(name, Role.BASE, decode_sequences=n, prefill_tokens=prefill_tokens)


def choose(
    policy: Policy, *loads: ServerLoad, shape: RequestShape = _ONE, now: float = 0.0
) -> Decision:
    return policy.choose(shape, loads, loads, now)


@pytest.mark.parametrize(
    ("on_spec", "on_base", "sequences", "decision"),
    [
        (0, 0, 1, Decision("eagle", Reason.BELOW_THRESHOLD)),
        (3, 4, 1, Decision("eagle", Reason.BELOW_THRESHOLD)),
        (4, 4, 1, Decision("plain", Reason.ABOVE_THRESHOLD)),
        (0, 8, 1, Decision("plain", Reason.ABOVE_THRESHOLD)),
        (0, 0, 8, Decision("eagle", Reason.BELOW_THRESHOLD)),
        (0, 0, 9, Decision("plain", Reason.ABOVE_THRESHOLD)),
    ],
)
def test_threshold_counts_all_servers_and_the_request_itself(
    on_spec: int, on_base: int, sequences: int, decision: Decision
) -> None:
    policy = make_policy("threshold", threshold=8)
    shape = RequestShape(sequences=sequences)
    assert choose(policy, spec(on_spec), base(on_base), shape=shape) == decision


def test_threshold_counts_prefill_as_well() -> None:
    waiting = ServerLoad("eagle", Role.SPEC, prefill_sequences=8)
    assert choose(make_policy("threshold"), waiting, base(0)).server == "plain"


def test_threshold_counts_servers_that_are_no_candidates() -> None:
    policy = make_policy("threshold")
    loads = (spec(0), spec(20, "eagle-2"), base(0))
    assert policy.choose(_ONE, (loads[0], loads[2]), loads, 0.0).reason is Reason.ABOVE_THRESHOLD


def test_between_the_thresholds_the_mode_stays() -> None:
    policy = make_policy("threshold", threshold=8, threshold_down=4, dwell_s=0)
    served = [choose(policy, spec(0), base(n)).server for n in (5, 8, 5, 4, 3, 5, 7, 8)]
    assert served == ["eagle", "plain", "plain", "plain", "eagle", "eagle", "eagle", "plain"]
    assert policy.switches == 3


def test_the_dwell_holds_a_mode_and_says_so() -> None:
    policy = make_policy("threshold", dwell_s=2.0)
    assert choose(policy, spec(9), base(0), now=10.0).server == "plain"
    assert choose(policy, spec(0), base(0), now=11.9) == Decision("plain", Reason.DWELL)
    assert policy.mode == "base"
    assert choose(policy, spec(0), base(0), now=12.0) == Decision("eagle", Reason.BELOW_THRESHOLD)
    assert policy.mode == "spec"


@pytest.mark.parametrize(("threshold", "back_at"), [(1, 1), (2, 1), (8, 6), (100, 80)])
def test_the_lower_threshold_is_a_fifth_below_and_can_be_reached(
    threshold: int, back_at: int
) -> None:
    policy = make_policy("threshold", threshold=threshold, dwell_s=0)
    assert choose(policy, spec(threshold), base(0)).server == "plain"
    assert choose(policy, spec(back_at), base(0), now=1).server == "plain"
    assert choose(policy, spec(back_at - 1), base(0), now=2).server == "eagle"


def test_a_threshold_of_zero_never_speculates() -> None:
    policy = make_policy("threshold", threshold=0, dwell_s=0)
    assert {choose(policy, spec(0), base(n)).server for n in (0, 5, 0)} == {"plain"}


def test_split_fills_the_spec_servers_first() -> None:
    policy = make_policy("split", threshold=8)
    assert choose(policy, spec(7), base(90)) == Decision("eagle", Reason.SPLIT)
    assert choose(policy, spec(8), base(0)) == Decision("plain", Reason.SPLIT)
    assert choose(policy, spec(4), spec(4, "eagle-2"), base(0)).server == "plain"
    assert choose(policy, spec(7), base(0), shape=RequestShape(sequences=2)).server == "plain"
    assert (policy.mode, policy.switches) == (None, 0)


def test_fixed_policies_look_at_no_load() -> None:
    for load in (0, 500):
        assert choose(make_policy("spec-only"), spec(load), base(0)).server == "eagle"
        assert choose(make_policy("base-only"), spec(0), base(load)).server == "plain"
    assert make_policy("spec-only").mode is Role.SPEC
    assert choose(make_policy("base-only"), spec(0), base(0)).reason is Reason.FIXED


def test_least_inflight_looks_at_no_role() -> None:
    policy = make_policy("least-inflight")
    assert choose(policy, spec(3), base(2)) == Decision("plain", Reason.LEAST_INFLIGHT)
    assert choose(policy, spec(1), base(2)) == Decision("eagle", Reason.LEAST_INFLIGHT)


@pytest.mark.parametrize("name", POLICIES)
def test_the_only_server_is_chosen_and_the_reason_says_so(name: str) -> None:
    policy = make_policy(name)
    loads = (spec(0), base(99))
    only = [policy.choose(_ONE, [load], loads, 0.0) for load in loads]
    assert [decision.server for decision in only] == ["eagle", "plain"]
    assert Reason.ONLY_SERVER in {decision.reason for decision in only}


def test_within_a_role_the_least_loaded_server_is_chosen() -> None:
    policy = make_policy("spec-only")
    assert choose(policy, spec(2, "a"), spec(1, "b"), base(0)).server == "b"
    # Fewer tokens in prefill where sequences tie.
    assert choose(policy, spec(1, "a", 900), spec(1, "b", 100), base(0)).server == "b"


def test_ties_are_spread_in_turn() -> None:
    policy = make_policy("spec-only")
    idle = [spec(0, name) for name in "abc"]
    assert [choose(policy, *idle).server for _ in range(6)] == list("abcabc")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "best"}, "unknown policy 'best', known: threshold, spec-only"),
        ({"name": "split", "threshold": -1}, "threshold must not be negative, not -1"),
        ({"name": "threshold", "threshold_down": 0}, "threshold_down must be 1 to 8"),
        ({"name": "threshold", "threshold_down": 9}, "threshold_down must be 1 to 8"),
        ({"name": "threshold", "dwell_s": -1}, "dwell"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_called_what_selects_it(name: str) -> None:
    assert make_policy(name).name == name
