from router.core.types import Decision, Reason
from router.dataplane.headers import (
    encode_head,
    first,
    forwarded_request,
    forwarded_response,
    own,
)


def test_what_connection_names_is_dropped_with_it() -> None:
    headers = [
        (b"connection", b"X-A , close"), (b"x-a", b"1"), (b"x-b", b"2"),
        (b"connection", b"x-c"), (b"x-c", b"3"),
    ]  # fmt: skip
    assert forwarded_request(headers) == [(b"x-b", b"2")]
    assert forwarded_response(headers) == [(b"x-b", b"2")]


def test_blanks_behind_a_value_are_no_part_of_it() -> None:
    headers = [(b"authorization", b"Bearer key \t"), (b"authorization", b"other"), (b"x-b", b" ")]
    assert first(headers, b"authorization") == b"Bearer key"
    assert first(headers, b"x-b") == b""
    assert first(headers, b"x-c") is None


def test_what_is_said_to_the_router_alone_is_not_forwarded() -> None:
    headers = [(b"x-crossover-session", b"1"), (b"x-crossover-target", b"spec"), (b"x-b", b"2")]
    assert forwarded_request(headers) == [(b"x-b", b"2")]


def test_a_response_cannot_forge_the_routers_own_headers() -> None:
    headers = [
        (b"x-crossover-server", b"x"), (b"x-crossover-reason", b"x"), (b"x-request-id", b"x"),
        (b"x-crossover-error", b"x"), (b"content-length", b"3"),
    ]  # fmt: skip
    assert forwarded_response(headers) == [(b"content-length", b"3")]


def test_the_head_says_how_long_the_body_is() -> None:
    head = encode_head("POST", b"/x?y=1", b"h:1", [(b"a", b"b")], 7)
    assert head == (
        b"POST /x?y=1 HTTP/1.1\r\nhost: h:1\r\na: b\r\naccept-encoding: identity\r\n"
        b"content-length: 7\r\n\r\n"
    )
    assert b"content-length: 0" in encode_head("POST", b"/", b"h", [], 0)
    assert b"content-length" not in encode_head("GET", b"/", b"h", [], 0)


def test_a_response_says_who_served_and_why() -> None:
    assert own("id", Decision("spec", Reason.DWELL)) == [
        (b"x-request-id", b"id"),
        (b"x-crossover-server", b"spec"),
        (b"x-crossover-reason", b"dwell"),
    ]


def test_every_connection_header_names_what_stops_here() -> None:
    given = [(b"connection", b"keep-alive"), (b"connection", b"X-Hop"), (b"x-hop", b"1")]
    assert forwarded_request([*given, (b"x-stays", b"2")]) == [(b"x-stays", b"2")]
