"""Who is let in, by which key, and what goes on to an engine."""

from base64 import b64encode

import pytest

from router.dataplane.asgi import Headers
from router.dataplane.auth import NO_CREDENTIALS, Credentials, Guard
from router.settings import Access, ClientKey

KEYS = (ClientKey("one"), ClientKey("two", "chat"))
GUARD = Guard(KEYS, "boss")


def bearer(key: str) -> Headers:
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("key", ["one", "two", "boss"])
def test_each_client_key_and_the_admin_key_let_in(key: str) -> None:
    assert GUARD.admits(bearer(key))
    assert GUARD.admits([(b"authorization", f"bearer {key}".encode())])
    assert GUARD.admits([(b"x-api-key", key.encode())])
    assert GUARD.is_admin(bearer(key)) is (key == "boss")


@pytest.mark.parametrize(
    "headers",
    [
        [], bearer(""), bearer("ONE"), bearer(" one"), bearer("on"), bearer("onetwo"),
        [(b"authorization", b"one")], [(b"authorization", b"Basic one")], [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer one")], [(b"authorization", b"Bearer k\xc3\xa9y")],
        [(b"authorization", b"Basic " + b64encode(b"u:one"))],
    ],
)  # fmt: skip
def test_nothing_else_does(headers: Headers) -> None:
    assert not GUARD.admits(headers)
    assert not GUARD.is_admin(headers)


def test_without_client_keys_everybody_is_let_in_but_nobody_is_the_operator() -> None:
    assert Guard().admits([])
    assert not Guard().is_admin(bearer(""))
    assert not Guard(admin_key="boss").is_admin([])
    assert Guard(admin_key="boss").is_admin(bearer("boss"))


def test_a_password_is_a_key_where_a_browser_may_send_one() -> None:
    right = [(b"authorization", b"Basic " + b64encode(b"anybody:two"))]
    assert GUARD.admits(right, as_password=True)
    for word in (b64encode(b"two:"), b64encode(b"two"), b"***", b""):
        assert not GUARD.admits([(b"authorization", b"Basic " + word)], as_password=True)


def test_a_password_never_makes_an_operator() -> None:
    assert not GUARD.is_admin([(b"authorization", b"Basic " + b64encode(b"u:boss"))])


def test_keys_of_the_routers_own_go_no_further() -> None:
    both = [*bearer("one"), (b"x-api-key", b"mine"), (b"x-b", b"1")]
    assert GUARD.stripped(both) == [(b"x-b", b"1")]
    open_to_all = Guard(admin_key="boss")
    assert open_to_all.stripped(both) == both
    assert open_to_all.stripped([*bearer("boss"), (b"x-b", b"1")]) == [(b"x-b", b"1")]
    assert open_to_all.stripped([(b"x-api-key", b"boss")]) == []


def test_a_server_is_sent_its_own_keys_in_place_of_a_clients() -> None:
    headers = [*bearer("client"), (b"x-api-key", b"client"), (b"x-b", b"1")]
    both = Credentials.of(Access("normal", "admin"))
    assert both.put_on(headers) == [(b"x-b", b"1"), (b"authorization", b"Bearer normal")]
    assert both.put_on([], admin=True) == [(b"authorization", b"Bearer admin")]
    assert NO_CREDENTIALS.put_on(headers) == headers


def test_a_server_with_one_key_is_sent_it_for_changes_too_and_an_admin_key_for_nothing_else() -> (
    None
):
    one = Credentials.of(Access(api_key="normal"))
    assert one.put_on([], admin=True) == [(b"authorization", b"Bearer normal")]
    admin_only = Credentials.of(Access(admin_key="admin"))
    assert admin_only.put_on(bearer("client")) == bearer("client")


def test_no_key_is_shown() -> None:
    shown = repr((KEYS, Access("s3cret", "s3cret"), GUARD))
    for key in ("one", "two", "s3cret"):
        assert f"'{key}'" not in shown
