"""Limits hold whatever comes, in whatever order, and nothing waits that could run."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.admission import Limits, Room
from router.core.health import ServerHealth
from router.core.ledger import Lease, Ledger
from router.core.policy import POLICIES, make_policy
from router.core.steering import Steering
from router.core.types import Outcome, RequestShape, Role, ServerSpec

_SERVERS = tuple(
    ServerSpec(name, role, "") for name, role in zip("ab", (Role.SPEC, Role.BASE), strict=True)
)
_EACH = Room(sequences=6, prefill_tokens=1000)
_TOTAL = Room(sequences=9, prefill_tokens=1500)


class Histories(RuleBasedStateMachine):
    """Requests of any size before two servers, and their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(_SERVERS)
        self.health = {server.name: ServerHealth() for server in _SERVERS}
        for health in self.health.values():
            health.probe_ok(0.0)
        self.leases: list[Lease] = []
        self.now = 0.0
        self.use("marginal")

    @rule(policy=st.sampled_from(POLICIES))
    def use(self, policy: str) -> None:
        self.steering = Steering(_SERVERS, make_policy(policy), self.ledger, self.health)
        self.steering.limits = Limits(_TOTAL, _EACH)
        self.steering.slow_start_s = 5.0

    @rule(sequences=st.integers(1, 8), prompt_tokens=st.integers(0, 1200), wait=st.floats(0, 3))
    def request(self, sequences: int, prompt_tokens: int, wait: float) -> None:
        self.now += wait
        shape = RequestShape(sequences, prompt_tokens)
        loads = self.ledger.loads()
        total = (sum(x.sequences for x in loads), sum(x.prefill_tokens for x in loads))
        roomy = {
            load.name
            for load in loads
            if _EACH.holds(shape, load.sequences, load.prefill_tokens)
            and _TOTAL.holds(shape, *total)
            and self.health[load.name].up
        }
        decision = self.steering.decide(shape, self.now)
        assert (decision is not None) == bool(roomy)
        if decision is not None:
            assert decision.server in roomy
            self.leases.append(self.ledger.acquire(decision.server, shape, self.now))

    @rule(place=st.integers(0, 20), token=st.booleans())
    def progress(self, place: int, token: bool) -> None:
        if self.leases:
            lease = self.leases[place % len(self.leases)]
            if token:
                lease.first_token(self.now)
            else:
                lease.release(Outcome.OK, self.now)
                self.leases.remove(lease)

    @rule(name=st.sampled_from("ab"), up=st.booleans())
    def health_changes(self, name: str, up: bool) -> None:
        if up:
            self.health[name].probe_ok(self.now)
        else:
            for _ in range(2):
                self.health[name].transport_error(self.now, "refused")

    @invariant()
    def no_limit_is_exceeded_but_by_one_request_alone(self) -> None:
        for load in self.ledger.loads():
            here = [lease for lease in self.leases if lease.server == load.name]
            assert load.sequences <= 6 or len(here) == 1
            waits = [lease for lease in here if lease.first_token_at is None]
            long = [lease for lease in waits if lease.shape.prompt_tokens]
            assert load.prefill_tokens <= 1000 or len(long) == 1
        assert sum(load.sequences for load in self.ledger.loads()) <= 9


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase
