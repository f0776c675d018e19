import pytest

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


def test_every_server_needs_its_health() -> None:
    with pytest.raises(ValueError, match="no health for: plain"):
        Steering(_SERVERS, make_policy("split"), Ledger(_SERVERS), {"eagle": ServerHealth()})
