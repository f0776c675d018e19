"""What browsers are told of an answer."""

import pytest

from router.dataplane.asgi import Headers
from router.dataplane.cors import Cors

PAGE = "https://chat.example"
NAMED = Cors((PAGE, "http://localhost:3000"))


def asking(origin: str = PAGE, *more: tuple[bytes, bytes]) -> Headers:
    return [
        (b"origin", origin.encode()), (b"access-control-request-method", b"POST"), *more,
    ]  # fmt: skip


def test_a_named_origin_may_read_answers() -> None:
    headers = dict(NAMED.headers(asking()))
    assert headers[b"access-control-allow-origin"] == PAGE.encode()
    assert b"x-crossover-server" in headers[b"access-control-expose-headers"]
    assert headers[b"vary"] == b"origin"
    assert b"access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "https://chat.example.evil", "null", "http://chat.example", "*", ""],
)
def test_no_other_origin_is_reflected(origin: str) -> None:
    assert NAMED.headers(asking(origin)) == [(b"vary", b"origin")]
    reply = NAMED.preflight("OPTIONS", asking(origin))
    assert reply is not None
    assert reply.status == 403


def test_a_star_says_a_star() -> None:
    headers = dict(Cors(("*",)).headers(asking("https://any.example")))
    assert headers[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in headers


def test_a_preflight_is_told_what_it_asked_for() -> None:
    wanted = (b"access-control-request-headers", b"authorization,content-type,x-stainless-os")
    reply = NAMED.preflight("OPTIONS", asking(PAGE, wanted))
    assert reply is not None
    headers = dict(reply.headers())
    assert (reply.status, reply.body()) == (200, b"")
    assert headers[b"access-control-allow-headers"] == wanted[1]
    assert b"POST" in headers[b"access-control-allow-methods"]


@pytest.mark.parametrize("names", [b"x: y\x0b", b"a" * 2000, b"a\xffb"])
def test_what_is_no_list_of_names_is_not_repeated(names: bytes) -> None:
    reply = NAMED.preflight("OPTIONS", asking(PAGE, (b"access-control-request-headers", names)))
    assert reply is not None
    assert b"access-control-allow-headers" not in dict(reply.headers())


def test_other_requests_are_no_preflights() -> None:
    assert NAMED.preflight("POST", asking()) is None
    assert NAMED.preflight("OPTIONS", asking()[:1]) is None
    assert NAMED.preflight("OPTIONS", asking()[1:]) is None


def test_without_origins_nothing_is_said() -> None:
    assert Cors().headers(asking()) == []
    assert Cors().preflight("OPTIONS", asking()) is None
