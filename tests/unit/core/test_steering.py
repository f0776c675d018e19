import pytest

from router.core.admission import Limits, Room
from router.core.breaker import Breaker, Verdict
from router.core.health import ServerHealth
from router.core.ledger import Ledger
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.types import Decision, Reason, RequestShape, Role, ServerSpec

_SERVERS = (ServerSpec("eagle", Role.SPEC, "http://a"), ServerSpec("plain", Role.BASE, "http://b"))
_ONE = RequestShape()


class Node:
    """Two servers that are up, and the steering in front of them."""

    def __init__(self, policy: str = "spec-only") -> None:
        self.ledger = Ledger(_SERVERS)
        self.eagle, self.plain = ServerHealth(), ServerHealth()
        self.health = {"eagle": self.eagle, "plain": self.plain}
        for health in self.health.values():
            health.probe_ok(0.0)
        self.steering = Steering(
            _SERVERS, make_policy(policy), self.ledger, self.health, recent_max=3
        )

    def unresponsive(self, *servers: ServerHealth) -> None:
        for server in servers:
            for _ in range(3):
                server.probe_failed(1.0, "timed out")

    def broken(self, *servers: ServerHealth) -> None:
        for server in servers:
            server.breaker = Breaker(failures_max=1)
            server.breaker.end(Verdict.FAILURE, 1.0, trial=False)

    def returned(self, server: ServerHealth, at: float) -> None:
        self.unreachable(server)
        server.probe_ok(at)

    def load(self, name: str, sequences: int, prompt_tokens: int = 0) -> None:
        self.ledger.acquire(name, RequestShape(sequences, prompt_tokens), 1.0)

    def unreachable(self, *servers: ServerHealth) -> None:
        for server in servers:
            for _ in range(2):
                server.transport_error(1.0, "refused")


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_policy_chooses_among_servers_that_are_up(node: Node) -> None:
    assert node.steering.decide(_ONE, 1.0) == Decision("eagle", Reason.FIXED)


def test_a_server_that_is_not_up_gets_nothing(node: Node) -> None:
    node.unreachable(node.eagle)
    assert node.steering.decide(_ONE, 2.0) == Decision("plain", Reason.ONLY_SERVER)


def test_a_server_that_never_came_up_gets_nothing() -> None:
    health = {server.name: ServerHealth() for server in _SERVERS}
    steering = Steering(_SERVERS, make_policy("threshold"), Ledger(_SERVERS), health)
    assert steering.decide(_ONE, 0.0) is None
    assert not steering.recent
    health["plain"].probe_ok(1.0)
    assert steering.decide(_ONE, 1.0) == Decision("plain", Reason.ONLY_SERVER)


def test_an_excluded_server_is_not_tried_again(node: Node) -> None:
    assert node.steering.decide(_ONE, 1.0, {"eagle"}) == Decision("plain", Reason.ONLY_SERVER)
    assert node.steering.decide(_ONE, 1.0, {"eagle", "plain"}) is None


def test_unresponsive_servers_are_the_last_resort(node: Node) -> None:
    node.unresponsive(node.eagle)
    assert node.steering.decide(_ONE, 2.0) == Decision("plain", Reason.ONLY_SERVER)
    node.unresponsive(node.plain)
    assert node.steering.decide(_ONE, 2.0) == Decision("eagle", Reason.FIXED)
    node.unreachable(node.eagle, node.plain)
    assert node.steering.decide(_ONE, 2.0) is None


@pytest.mark.parametrize(
    ("shape", "server", "reason"),
    [
        (RequestShape(prompt_tokens=3000, max_tokens=1096), "eagle", Reason.FIXED),
        (RequestShape(prompt_tokens=3000, max_tokens=1097), "plain", Reason.CONTEXT_LENGTH),
        (RequestShape(prompt_tokens=4097), "plain", Reason.CONTEXT_LENGTH),
        # A batch of short prompts is not one long prompt.
        (
            RequestShape(sequences=9, prompt_tokens=9000, longest_prompt_tokens=1000),
            "eagle",
            Reason.FIXED,
        ),
        # What fits nowhere is sent all the same: the engine says what is wrong.
        (RequestShape(prompt_tokens=9000), "eagle", Reason.FIXED),
    ],
)
def test_a_request_too_long_for_one_server_goes_to_the_other(
    node: Node, shape: RequestShape, server: str, reason: Reason
) -> None:
    node.eagle.context_length, node.plain.context_length = 4096, 8192
    assert node.steering.decide(shape, 1.0) == Decision(server, reason)


def test_an_unknown_context_length_holds_everything(node: Node) -> None:
    node.plain.context_length = 10
    assert node.steering.decide(RequestShape(prompt_tokens=10**6), 1.0) == Decision(
        "eagle", Reason.FIXED
    )


def test_a_long_request_that_belongs_there_anyway_keeps_its_reason() -> None:
    node = Node("base-only")
    node.eagle.context_length = 10
    assert node.steering.decide(RequestShape(prompt_tokens=99), 1.0) == Decision(
        "plain", Reason.FIXED
    )


def test_the_load_of_an_excluded_server_counts() -> None:
    node = Node("threshold")
    node.ledger.acquire("eagle", RequestShape(sequences=20), 0.0)
    assert node.steering.decide(_ONE, 1.0, {"plain"}) == Decision("eagle", Reason.ONLY_SERVER)
    assert node.steering.policy.mode is Role.BASE


def test_recent_decisions_are_kept_with_their_loads_within_a_bound(node: Node) -> None:
    for now in (1.0, 2.0, 3.0, 4.0):
        node.steering.decide(_ONE, now)
        node.ledger.acquire("eagle", _ONE, now)
    assert [record.at for record in node.steering.recent] == [2.0, 3.0, 4.0]
    record = node.steering.recent[0]
    assert record.decision == Decision("eagle", Reason.FIXED)
    assert [load.sequences for load in record.loads] == [1, 0]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(each=Room(sequences=4)),
        Limits(each=Room(prefill_tokens=100)),
        Limits(of={"eagle": Room(sequences=4)}),
    ],
)
def test_a_server_without_room_gives_way_to_one_with_room(node: Node, limits: Limits) -> None:
    node.steering.limits = limits
    node.load("eagle", 4, 100)
    shape = RequestShape(prompt_tokens=10)
    assert node.steering.decide(shape, 1.0) == Decision("plain", Reason.ONLY_SERVER)


def test_without_room_anywhere_there_is_no_decision_though_servers_serve(node: Node) -> None:
    node.steering.limits = Limits(total=Room(sequences=4))
    node.load("eagle", 4)
    assert node.steering.decide(_ONE, 1.0) is None
    assert node.steering.serves()
    assert not node.steering.recent
    assert node.steering.decide(RequestShape(sequences=0), 1.0) is not None


def test_a_drained_server_gets_nothing_even_if_it_is_the_last(node: Node) -> None:
    node.steering.drained.add("eagle")
    assert node.steering.decide(_ONE, 1.0) == Decision("plain", Reason.ONLY_SERVER)
    assert node.steering.decide(_ONE, 1.0, {"plain"}) is None
    assert not node.steering.serves({"plain"})


def test_a_server_whose_breaker_is_open_gives_way_to_a_sound_one(node: Node) -> None:
    node.broken(node.eagle)
    assert node.steering.decide(_ONE, 1.0) == Decision("plain", Reason.ONLY_SERVER)


def test_the_last_server_is_used_whatever_its_breaker_says(node: Node) -> None:
    node.broken(node.eagle)
    assert node.steering.decide(_ONE, 1.0, {"plain"}) == Decision("eagle", Reason.FIXED)
    node.broken(node.plain)
    assert node.steering.decide(_ONE, 1.0) == Decision("eagle", Reason.FIXED)


def test_a_full_server_is_waited_for_rather_than_using_a_broken_one(node: Node) -> None:
    node.broken(node.eagle)
    node.steering.limits = Limits(each=Room(sequences=1))
    node.load("plain", 1)
    assert node.steering.decide(_ONE, 1.0) is None


def test_a_request_that_fits_only_a_broken_server_goes_there(node: Node) -> None:
    node.eagle.context_length, node.plain.context_length = 8192, 4096
    node.broken(node.eagle)
    decision = node.steering.decide(RequestShape(prompt_tokens=5000), 1.0)
    assert decision is not None
    assert decision.server == "eagle"


def test_a_server_that_returns_gets_its_share_step_by_step(node: Node) -> None:
    node.steering.slow_start_s = 10.0
    node.returned(node.eagle, at=100.0)
    taken = {}
    for now in (100.0, 102.0, 104.0, 110.0):
        count = 0
        while (decision := node.steering.decide(_ONE, now)) is not None and count < 500:
            if decision.server != "eagle":
                break
            node.load("eagle", 1)
            count += 1
        taken[now] = node.ledger.load("eagle").sequences
    assert taken == {100.0: 4, 102.0: 8, 104.0: 16, 110.0: 516}


def test_slow_start_makes_no_request_wait_and_refuses_none(node: Node) -> None:
    node.steering.slow_start_s = 10.0
    node.returned(node.eagle, at=100.0)
    node.load("eagle", 50)
    assert node.steering.decide(_ONE, 100.0, {"plain"}) == Decision("eagle", Reason.FIXED)
    node.returned(node.plain, at=100.0)
    node.load("plain", 50)
    assert node.steering.decide(_ONE, 100.0) == Decision("eagle", Reason.FIXED)


def test_every_server_needs_its_health() -> None:
    with pytest.raises(ValueError, match="no health for: plain"):
        Steering(_SERVERS, make_policy("split"), Ledger(_SERVERS), {"eagle": ServerHealth()})
