"""After any history the counts are what the open leases add up to."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from router.core.ledger import Lease, Ledger
from router.core.types import Outcome, Phase, RequestShape, Role, ServerSpec

_SERVERS = tuple(
    ServerSpec(name, role, "") for name, role in zip("abc", (*Role, Role.SPEC), strict=True)
)


class Histories(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(_SERVERS)
        self.now = 0.0
        self.open: dict[Lease, Phase] = {}

    @rule(
        target=leases,
        server=st.sampled_from("abc"),
        sequences=st.integers(0, 16),
        prompt_tokens=st.integers(0, 10_000),
    )
    def acquire(self, server: str, sequences: int, prompt_tokens: int) -> Lease:
        self.now += 1
        lease = self.ledger.acquire(server, RequestShape(sequences, prompt_tokens), self.now)
        self.open[lease] = Phase.PREFILL
        return lease

    @rule(lease=leases)
    def first_token(self, lease: Lease) -> None:
        lease.first_token(self.now)
        if lease in self.open:
            self.open[lease] = Phase.DECODE

    @rule(lease=leases, outcome=st.sampled_from(Outcome))
    def release(self, lease: Lease, outcome: Outcome) -> None:
        before = lease.outcome
        assert lease.release(outcome, self.now) is (lease in self.open)
        assert lease.outcome is (before or outcome)
        self.open.pop(lease, None)

    @invariant()
    def counts_are_the_sums_over_open_leases(self) -> None:
        assert len(self.ledger) == len(self.open)
        for load in self.ledger.loads():
            here = [
                (lease.shape, phase)
                for lease, phase in self.open.items()
                if lease.server == load.name
            ]
            prefill = [shape for shape, phase in here if phase is Phase.PREFILL]
            assert load.prefill_sequences == sum(shape.sequences for shape in prefill)
            assert load.prefill_tokens == sum(shape.prompt_tokens for shape in prefill)
            assert load.sequences == sum(shape.sequences for shape, _ in here)

    @invariant()
    def the_oldest_is_the_first_that_is_open(self) -> None:
        ages = [self.now - lease.acquired_at for lease in self.open]
        assert self.ledger.oldest_age_s(self.now) == max(ages, default=None)

    def teardown(self) -> None:
        for lease in list(self.open):
            self.release(lease, Outcome.OK)
        assert all(load.sequences == load.prefill_tokens == 0 for load in self.ledger.loads())


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
