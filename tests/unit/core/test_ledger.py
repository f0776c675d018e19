import pytest

from router.core.ledger import Ledger
from router.core.types import Outcome, Phase, RequestShape, Role, ServerLoad, ServerSpec

_SERVERS = (ServerSpec("eagle", Role.SPEC, "http://a"), ServerSpec("plain", Role.BASE, "http://b"))
_SHAPE = RequestShape(sequences=2, prompt_tokens=500)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(_SERVERS)


def test_a_lease_is_prefill_then_decode_then_gone(ledger: Ledger) -> None:
    lease = ledger.acquire("eagle", _SHAPE, 1.0)
    assert ledger.load("eagle") == ServerLoad("eagle", Role.SPEC, 2, 0, 500, 500)
    assert (lease.phase, lease.first_token_at, lease.outcome) == (Phase.PREFILL, None, None)

    lease.first_token(3.0)
    assert ledger.load("eagle") == ServerLoad("eagle", Role.SPEC, 0, 2, 0, 500)
    assert (lease.phase, lease.first_token_at) == (Phase.DECODE, 3.0)

    assert lease.release(Outcome.OK, 9.0)
    assert ledger.load("eagle") == ServerLoad("eagle", Role.SPEC)
    assert (lease.outcome, lease.released_at, len(ledger)) == (Outcome.OK, 9.0, 0)


def test_a_lease_may_end_in_prefill(ledger: Ledger) -> None:
    ledger.acquire("plain", _SHAPE, 0.0).release(Outcome.CLIENT_DISCONNECT, 1.0)
    assert ledger.load("plain") == ServerLoad("plain", Role.BASE)


def test_late_and_repeated_calls_change_nothing(ledger: Ledger) -> None:
    other = ledger.acquire("eagle", _SHAPE, 0.0)
    lease = ledger.acquire("eagle", _SHAPE, 0.0)
    lease.first_token(1.0)
    lease.first_token(2.0)
    assert lease.first_token_at == 1.0
    assert lease.release(Outcome.TIMEOUT, 3.0)
    assert not lease.release(Outcome.OK, 4.0)
    lease.first_token(5.0)
    assert (lease.outcome, lease.released_at) == (Outcome.TIMEOUT, 3.0)
    assert ledger.load("eagle") == ServerLoad("eagle", Role.SPEC, 2, 0, 500, 500)
    other.release(Outcome.OK, 6.0)
    other.first_token(7.0)
    assert (other.phase, other.first_token_at) == (Phase.PREFILL, None)
    assert ledger.load("eagle") == ServerLoad("eagle", Role.SPEC)


def test_loads_keep_the_order_of_the_configuration(ledger: Ledger) -> None:
    ledger.acquire("plain", _SHAPE, 0.0)
    assert [load.name for load in ledger.loads()] == ["eagle", "plain"]
    assert [load.sequences for load in ledger.loads()] == [0, 2]


def test_the_oldest_open_lease_tells_its_age(ledger: Ledger) -> None:
    assert ledger.oldest_age_s(5.0) is None
    first, second = (ledger.acquire("eagle", _SHAPE, at) for at in (1.0, 4.0))
    assert ledger.oldest_age_s(5.0) == 4.0
    first.release(Outcome.OK, 5.0)
    assert ledger.oldest_age_s(5.0) == 1.0
    second.release(Outcome.OK, 5.0)
    assert ledger.oldest_age_s(5.0) is None


@pytest.mark.parametrize(
    ("server", "shape"),
    [
        ("nobody", _SHAPE),
        ("eagle", RequestShape(sequences=-1)),
        ("eagle", RequestShape(prompt_tokens=-1)),
    ],
)
def test_what_cannot_be_counted_is_refused_and_changes_nothing(
    ledger: Ledger, server: str, shape: RequestShape
) -> None:
    with pytest.raises(ValueError, match=r"unknown server 'nobody'|must not be negative"):
        ledger.acquire(server, shape, 0.0)
    assert (len(ledger), ledger.loads()) == (0, Ledger(_SERVERS).loads())


def test_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        Ledger([_SERVERS[0], _SERVERS[0]])


def test_room_is_told_of_whenever_a_count_becomes_less(ledger: Ledger) -> None:
    told: list[int] = []
    ledger.on_room = lambda: told.append(ledger.load("eagle").prefill_tokens)
    lease = ledger.acquire("eagle", _SHAPE, 0.0)
    assert told == []
    lease.first_token(1.0)
    lease.first_token(2.0)
    assert told == [0]
    lease.release(Outcome.OK, 3.0)
    lease.release(Outcome.OK, 4.0)
    assert told == [0, 0]
    assert len(ledger) == 0


def test_ends_are_counted_whether_a_token_came_or_not(ledger: Ledger) -> None:
    ledger.acquire("eagle", _SHAPE, 0.0).release(Outcome.UPSTREAM_ERROR, 1.0)
    lease = ledger.acquire("eagle", _SHAPE, 1.0)
    lease.first_token(2.0)
    assert ledger.totals("eagle", 3.0).ended_sequences == 2
    lease.release(Outcome.OK, 3.0)
    assert ledger.totals("eagle", 3.0).ended_sequences == 4
