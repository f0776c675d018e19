"""What holds for the learnt policy whatever happens, in whatever order."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Lease, Ledger
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.tuning import Tuning
from router.core.types import (
    EngineReport,
    Layout,
    Objective,
    Outcome,
    RequestShape,
    Role,
    ServerLoad,
    ServerSpec,
    SwitchReport,
)

_SERVERS = tuple(
    ServerSpec(name, role, "")
    for name, role in zip("abcd", (Role.SPEC, Role.BASE, Role.SPEC, Role.BASE), strict=True)
)
_JUNK = st.one_of(st.none(), st.integers(-10, 10**12), st.floats(), st.text(max_size=3))


class Histories(RuleBasedStateMachine):
    """Requests, tokens, reports and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.layout = Layout.DISJOINT
        self.leases: list[Lease] = []
        self.tokens = dict.fromkeys("abcd", 0.0)
        self.build(Layout.DISJOINT)

    def build(self, layout: Layout) -> None:
        self.learner = Learner(_SERVERS, layout=layout)
        self.ledger = Ledger(_SERVERS)
        self.health = {server.name: ServerHealth() for server in _SERVERS}
        for health in self.health.values():
            health.probe_ok(self.now)
        policy = make_policy("marginal", learner=self.learner)
        self.steering = Steering(_SERVERS, policy, self.ledger, self.health, learner=self.learner)
        self.leases = []

    @rule(layout=st.sampled_from(Layout))
    def restart(self, layout: Layout) -> None:
        self.build(layout)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        sequences=st.integers(0, 64),
        prompt_tokens=st.integers(0, 10**5),
        session=st.one_of(st.none(), st.integers(0, 3)),
        repeat=st.integers(1, 12),
    )
    def request(self, sequences: int, prompt_tokens: int, session: int | None, repeat: int) -> None:
        shape = RequestShape(sequences, prompt_tokens, session=session)
        for _ in range(repeat):
            decision = self.steering.decide(shape, self.now)
            up = [name for name, health in self.health.items() if health.up]
            if decision is None:
                assert not up
                return
            assert not up or decision.server in up
            self.leases.append(self.ledger.acquire(decision.server, shape, self.now))

    @rule(place=st.integers(0, 100), token=st.booleans())
    def progress(self, place: int, token: bool) -> None:
        if self.leases:
            lease = self.leases[place % len(self.leases)]
            if token:
                lease.first_token(self.now)
            else:
                lease.release(Outcome.OK, self.now)

    @rule(name=st.sampled_from("abcd"), tokens=st.floats(0, 1e6), seconds=st.floats(0, 5))
    def observe(self, name: str, tokens: float, seconds: float) -> None:
        self.now += seconds
        self.tokens[name] += tokens
        self.steering.observe(self.now, self.tokens)

    @rule(name=st.sampled_from("abcd"), tokens=st.floats(-1e9, 1e9))
    def counter_jumps(self, name: str, tokens: float) -> None:
        self.steering.observe(self.now, {name: tokens})

    @rule(name=st.sampled_from("abcd"), running=_JUNK, queued=_JUNK, threshold=_JUNK)
    def report(self, name: str, running: object, queued: object, threshold: object) -> None:
        switch = SwitchReport("active", "on", threshold)  # type: ignore[arg-type]
        report = EngineReport(running, queued, switch)  # type: ignore[arg-type]
        self.steering.engine_reported(name, self.now, report)

    @rule(name=st.sampled_from("abcd"), up=st.booleans())
    def health_changes(self, name: str, up: bool) -> None:
        if up:
            self.health[name].probe_ok(self.now)
        else:
            for _ in range(2):
                self.health[name].transport_error(self.now, "refused")

    @invariant()
    def what_is_learnt_can_be_shown_and_kept(self) -> None:
        json.dumps(self.learner.snapshot(), allow_nan=False)
        learnt = self.learner.learnt()
        again = Calibration.from_json(json.loads(json.dumps(learnt.to_json())), "state")
        assert again == learnt
        Learner(_SERVERS, calibration=again)


Histories.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase


def _learner(spec: list[float], base: list[float]) -> Learner:
    """A learner whose curves have these levels at 1, 4, 16, 64 sequences, in milliseconds."""

    def profile(role: Role, levels: list[float]) -> ServerProfile:
        seconds = [sum(levels[: at + 1]) / 1e3 for at in range(4)]
        return ServerProfile(
            role,
            tpot=tuple(
                TpotPoint(n, s, s, s, 10) for n, s in zip((1, 4, 16, 64), seconds, strict=True)
            ),
        )

    given_ = Calibration((profile(Role.SPEC, spec), profile(Role.BASE, base)))
    return Learner(_SERVERS[:2], calibration=given_, tuning=Tuning(explore_share=0.0))


_LEVELS = st.lists(st.floats(0.5, 20), min_size=4, max_size=4)


@settings(deadline=None, max_examples=200)
@given(
    spec=_LEVELS,
    base=_LEVELS,
    slower=st.floats(1.0, 10.0),
    on_spec=st.integers(0, 200),
    on_base=st.integers(0, 200),
    objective=st.sampled_from(Objective),
)
def test_a_slower_server_never_gains_a_request(
    spec: list[float],
    base: list[float],
    slower: float,
    on_spec: int,
    on_base: int,
    objective: Objective,
) -> None:
    loads = (
        ServerLoad("a", Role.SPEC, decode_sequences=on_spec),
        ServerLoad("b", Role.BASE, decode_sequences=on_base),
    )

    def server(levels: list[float]) -> str:
        policy = make_policy("marginal", learner=_learner(levels, base), objective=objective)
        return policy.choose(RequestShape(), loads, loads, 1.0).server

    if server(spec) == "b":
        assert server([level * slower for level in spec]) == "b"
