"""What holds for every policy under every load."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.policy import POLICIES, make_policy
from router.core.types import RequestShape, Role, ServerLoad

_LOADS = st.lists(
    st.builds(
        ServerLoad,
        name=st.uuids().map(str),
        role=st.sampled_from(Role),
        prefill_sequences=st.integers(0, 300),
        decode_sequences=st.integers(0, 300),
        prefill_tokens=st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=6,
)
_SHAPE = st.builds(RequestShape, sequences=st.integers(0, 64))


@settings(deadline=None)
@given(st.sampled_from(POLICIES), st.integers(0, 200), _LOADS, st.data(), _SHAPE)
def test_the_chosen_server_is_a_candidate_and_the_least_loaded_of_its_role(
    name: str, threshold: int, loads: list[ServerLoad], data: st.DataObject, shape: RequestShape
) -> None:
    candidates = data.draw(st.lists(st.sampled_from(loads), min_size=1, unique=True))
    decision = make_policy(name, threshold=threshold).choose(shape, candidates, loads, 0.0)
    [chosen] = [load for load in candidates if load.name == decision.server]
    rivals = [load for load in candidates if load.role is chosen.role]
    assert (chosen.sequences, chosen.prefill_tokens) == min(
        (r.sequences, r.prefill_tokens) for r in rivals
    )


@settings(deadline=None)
@given(
    threshold=st.integers(1, 64),
    dwell_s=st.floats(0.01, 30),
    arrivals=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 128)), max_size=100),
)
def test_a_mode_lasts_for_the_dwell_whatever_the_load(
    threshold: int, dwell_s: float, arrivals: list[tuple[float, int]]
) -> None:
    policy = make_policy("threshold", threshold=threshold, dwell_s=dwell_s)
    now = 0.0
    switched_at: list[float] = []
    for gap, in_flight in arrivals:
        now += gap
        before = policy.mode
        loads = (ServerLoad("s", Role.SPEC), ServerLoad("b", Role.BASE, decode_sequences=in_flight))
        decision = policy.choose(RequestShape(), loads, loads, now)
        assert (decision.server == "s") is (policy.mode is Role.SPEC)
        if policy.mode is not before:
            switched_at.append(now)
    assert len(switched_at) == policy.switches
    assert all(b - a >= dwell_s for a, b in pairwise(switched_at))


@settings(deadline=None)
@given(
    name=st.sampled_from(["threshold", "split"]),
    threshold=st.integers(0, 64),
    on_spec=st.integers(0, 128),
    on_base=st.integers(0, 128),
    more_spec=st.integers(0, 64),
    more_base=st.integers(0, 64),
)
def test_more_load_never_moves_a_request_from_base_to_spec(
    name: str, threshold: int, on_spec: int, on_base: int, more_spec: int, more_base: int
) -> None:
    def role(spec: int, base: int) -> str:
        loads = (
            ServerLoad("s", Role.SPEC, decode_sequences=spec),
            ServerLoad("b", Role.BASE, decode_sequences=base),
        )
        policy = make_policy(name, threshold=threshold)
        return policy.choose(RequestShape(), loads, loads, 0.0).server

    if role(on_spec, on_base) == "b":
        assert role(on_spec + more_spec, on_base + more_base) == "b"
