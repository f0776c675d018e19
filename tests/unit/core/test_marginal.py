import pytest

from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.learner import Learner
from router.core.policy import make_policy
from router.core.tuning import Tuning
from router.core.types import (
    Decision,
    EngineReport,
    Layout,
    Objective,
    Policy,
    Reason,
    RequestShape,
    Role,
    ServerLoad,
    SwitchReport,
)
from tests.unit.core.steered import SERVERS, Curve, Steered, line

# Speculation is the faster up to 10 sequences.
_SPEC, _BASE = line(4, 0.4), line(7, 0.1)
_PAIR = {"spec": _SPEC, "base": _BASE}
_LOADS = (1, 2, 3, 4, 8, 16, 32, 64, 128)


def calibration(spec: Curve = _SPEC, base: Curve = _BASE) -> Calibration:
    def profile(role: Role, curve: Curve) -> ServerProfile:
        points = tuple(TpotPoint(n, curve(n), curve(n), curve(n), 10) for n in _LOADS)
        return ServerProfile(role, tpot=points)

    return Calibration((profile(Role.SPEC, spec), profile(Role.BASE, base)))


def decide(
    spec: int,
    base: int,
    shape: RequestShape | None = None,
    objective: Objective = Objective.SUMMED,
    tuning: Tuning | None = None,
    given: Calibration | None = None,
) -> Decision:
    """The decision of a calibrated policy at these loads, with nothing to explore."""
    tuning = tuning or Tuning(explore_share=0.0)
    learner = Learner(SERVERS, calibration=given or calibration(), tuning=tuning)
    loads = (
        ServerLoad("spec", Role.SPEC, decode_sequences=spec),
        ServerLoad("base", Role.BASE, decode_sequences=base),
    )
    policy = make_policy("marginal", learner=learner, objective=objective)
    return policy.choose(shape or RequestShape(), loads, loads, 1.0)


@pytest.mark.parametrize(
    ("spec", "base", "server"),
    [(0, 0, "spec"), (3, 0, "spec"), (8, 0, "base"), (8, 40, "spec"), (20, 20, "base")],
)
def test_a_request_goes_where_summed_time_per_token_grows_least(
    spec: int, base: int, server: str
) -> None:
    assert decide(spec, base) == Decision(server, Reason.MARGINAL)


def test_the_objectives_differ_where_they_should() -> None:
    # Own time: 4 + 0.4 * 6 on spec, 7.1 on base. Summed: 2 more for the five already there.
    assert decide(5, 0, objective=Objective.LATENCY).server == "spec"
    assert decide(5, 0, objective=Objective.SUMMED).server == "base"
    # The idle base server adds most tokens a second.
    steep = calibration(line(2, 0.8))
    assert decide(2, 0, objective=Objective.RATE, given=steep).server == "base"
    assert decide(2, 0, objective=Objective.SUMMED, given=steep).server == "spec"


def test_a_request_of_many_sequences_counts_as_many() -> None:
    assert decide(0, 0, RequestShape(sequences=1)).server == "spec"
    assert decide(0, 0, RequestShape(sequences=24)).server == "base"


@pytest.mark.parametrize("clients", [1, 2, 4, 8, 16, 48])
def test_from_nothing_it_is_soon_as_good_as_the_better_server(clients: int) -> None:
    steered = Steered(dict(_PAIR))
    steered.run(clients, 10)
    rate = steered.run(clients, 20)
    best = max(clients / curve(clients) for curve in (_SPEC, _BASE))
    assert rate > 0.98 * best


def test_the_crossover_is_found_from_traffic() -> None:
    steered = Steered(dict(_PAIR))
    for clients in (1, 4, 16, 40, 16, 4):
        steered.run(clients, 10)
    crossover = steered.learner.crossover()
    assert crossover is not None
    assert 9 <= crossover <= 13


def test_a_server_that_slows_down_loses_its_requests() -> None:
    steered = Steered(dict(_PAIR))
    steered.run(4, 20)
    steered.curves["spec"] = lambda n: 3 * _SPEC(n)
    steered.run(4, 5)
    before = dict(steered.requests)
    steered.run(4, 10)
    sent = {name: steered.requests[name] - before[name] for name in before}
    assert sent["base"] > 10 * sent["spec"]


@pytest.mark.parametrize("probes", [True, False])
def test_an_unused_server_that_recovers_is_found_by_probes_only(probes: bool) -> None:
    steered = Steered(dict(_PAIR), tuning=Tuning(explore_share=0.01 if probes else 0.0))
    steered.curves["spec"] = lambda n: 3 * _SPEC(n)
    steered.run(4, 30)
    steered.curves["spec"] = _SPEC
    steered.run(4, 60)
    before = dict(steered.requests)
    steered.run(4, 20)
    on_spec = steered.requests["spec"] - before["spec"]
    assert (on_spec > steered.requests["base"] - before["base"]) is probes


def test_probes_are_few() -> None:
    steered = Steered({"spec": line(4, 0.1), "base": line(12, 0.1)})
    steered.run(4, 120)
    assert steered.requests["base"] < 0.02 * steered.requests["spec"]


class TestSessions:
    def policy_with(self, tuning: Tuning) -> Policy:
        learner = Learner(SERVERS, calibration=calibration(_BASE, _BASE), tuning=tuning)
        return make_policy("marginal", learner=learner)

    def choose(self, policy: Policy, spec: int, base: int) -> Decision:
        loads = (
            ServerLoad("spec", Role.SPEC, decode_sequences=spec),
            ServerLoad("base", Role.BASE, decode_sequences=base),
        )
        return policy.choose(RequestShape(session=7), loads, loads, 1.0)

    def test_a_conversation_stays_where_it_was_if_that_costs_little(self) -> None:
        policy = self.policy_with(Tuning(explore_share=0.0))
        assert self.choose(policy, 0, 1).server == "spec"
        assert self.choose(policy, 3, 2) == Decision("spec", Reason.AFFINITY)

    def test_a_conversation_leaves_a_server_that_is_loaded(self) -> None:
        policy = self.policy_with(Tuning(explore_share=0.0))
        assert self.choose(policy, 0, 1).server == "spec"
        assert self.choose(policy, 40, 2) == Decision("base", Reason.MARGINAL)

    def test_no_bonus_no_affinity(self) -> None:
        policy = self.policy_with(Tuning(explore_share=0.0, affinity_share=0.0))
        assert self.choose(policy, 0, 1).server == "spec"
        assert self.choose(policy, 3, 2) == Decision("base", Reason.MARGINAL)


class TestEngineReports:
    def reporting(self, **counts: object) -> Steered:
        steered = Steered(dict(_PAIR), calibration=calibration(), tuning=Tuning(explore_share=0.0))
        for _ in range(3):
            steered.steering.engine_reported("spec", 0.0, EngineReport(**counts))  # type: ignore[arg-type]
        return steered

    def test_traffic_that_bypasses_the_router_counts(self) -> None:
        assert self.reporting(running=0).send().server == "spec"
        assert self.reporting(running=20).send().server == "base"
        assert self.reporting(running=10, queued=10).send().server == "base"

    @pytest.mark.parametrize("running", [-5, 10**9, "20", True, 20.5, None])
    def test_what_cannot_be_a_count_is_not_believed(self, running: object) -> None:
        assert self.reporting(running=running).send().server == "spec"

    def test_one_report_is_not_enough(self) -> None:
        steered = Steered(dict(_PAIR), calibration=calibration())
        steered.steering.engine_reported("spec", 0.0, EngineReport(running=20))
        assert steered.send().server == "spec"

    def test_an_old_report_counts_no_more(self) -> None:
        steered = self.reporting(running=20)
        steered.now = 60.0
        assert steered.send().server == "spec"

    def test_a_server_that_switches_itself_has_two_branches(self) -> None:
        steered = Steered({"spec": lambda n: _SPEC(n) if n <= 8 else _BASE(n), "base": _BASE})
        switch = SwitchReport("active", "on", threshold=8)
        steered.steering.engine_reported("spec", 0.0, EngineReport(switch=switch))
        for clients in (4, 64, 8, 96):
            steered.run(clients, 15)
        low, high = (steered.learner.tpot_s("spec", n) for n in (4, 40))
        assert low is not None
        assert high is not None
        assert low.value == pytest.approx(_SPEC(4), rel=0.1)
        assert high.value == pytest.approx(_BASE(40), rel=0.1)


class TestSharedGpus:
    def steered(self, **other: object) -> Steered:
        return Steered(dict(_PAIR), declared=Layout.SHARED, shared=True, **other)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("clients", "role"), [(2, Role.SPEC), (4, Role.SPEC), (40, Role.BASE)])
    def test_with_a_calibration_the_better_role_serves(self, clients: int, role: Role) -> None:
        steered = self.steered(calibration=calibration())
        steered.run(clients, 30)
        assert steered.policy.mode is role
        assert steered.policy.switches <= 1

    @pytest.mark.parametrize(("clients", "role"), [(2, Role.SPEC), (40, Role.BASE)])
    def test_without_one_a_trial_finds_it(self, clients: int, role: Role) -> None:
        steered = self.steered()
        steered.run(clients, 60)
        assert steered.policy.mode is role
        assert steered.policy.switches <= 2

    def test_it_does_not_split(self) -> None:
        steered = self.steered(calibration=calibration())
        steered.run(40, 20)
        before = steered.requests["spec"]
        steered.run(40, 20)
        assert steered.requests["spec"] == before


class TestLearntLayout:
    @pytest.mark.parametrize("clients", [4, 8, 16])
    def test_gpus_that_turn_out_to_be_shared_are_noticed_within_a_minute(
        self, clients: int
    ) -> None:
        steered = Steered(dict(_PAIR), shared=True)
        steered.run(clients, 60)
        assert steered.learner.layout is Layout.SHARED
        # What was never seen at like loads is known by a bound only.
        assert steered.learner.interference().slowdown > 1.3
        assert steered.learner.snapshot()["layout"] == {"declared": "disjoint", "learnt": "shared"}

    def test_the_declared_layout_holds_where_learning_it_is_switched_off(self) -> None:
        steered = Steered(dict(_PAIR), shared=True, tuning=Tuning(learn_layout=False))
        steered.run(8, 60)
        assert steered.learner.layout is Layout.DISJOINT

    @pytest.mark.parametrize("clients", [4, 16, 48])
    def test_gpus_of_their_own_are_not_suspected(self, clients: int) -> None:
        steered = Steered(dict(_PAIR))
        steered.run(clients, 60)
        assert steered.learner.layout is Layout.DISJOINT

    def test_a_server_that_slows_down_is_no_sign_of_shared_gpus(self) -> None:
        steered = Steered(dict(_PAIR))
        steered.run(24, 40)
        steered.curves["base"] = lambda n: 1.8 * _BASE(n)
        steered.run(24, 40)
        assert steered.learner.layout is Layout.DISJOINT
