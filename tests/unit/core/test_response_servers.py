"""Where stored responses are remembered to be."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.response_servers import ResponseServers


def test_a_response_is_where_it_was_last_seen() -> None:
    servers = ResponseServers()
    assert servers.server_of("resp_1", 0.0) is None
    servers.remember("resp_1", "spec", 0.0)
    servers.remember("resp_1", "base", 1.0)
    assert servers.server_of("resp_1", 2.0) == "base"
    assert len(servers) == 1


def test_it_is_forgotten_after_a_time_in_which_nobody_asked() -> None:
    servers = ResponseServers(kept_s=10.0)
    servers.remember("used", "spec", 0.0)
    servers.remember("unused", "spec", 0.0)
    assert servers.server_of("used", 9.0) == "spec"
    assert servers.server_of("unused", 10.0) is None
    assert servers.server_of("used", 18.9) == "spec"
    assert len(servers) == 1


def test_beyond_the_bound_the_one_that_nobody_asked_for_longest_goes_first() -> None:
    servers = ResponseServers(size_max=2)
    servers.remember("a", "spec", 0.0)
    servers.remember("b", "base", 1.0)
    assert servers.server_of("a", 2.0) == "spec"
    servers.remember("c", "base", 3.0)
    assert servers.server_of("b", 4.0) is None
    assert servers.server_of("a", 4.0) == "spec"
    assert servers.server_of("c", 4.0) == "base"


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["spec", "base"]))),
    st.integers(1, 5),
)
def test_it_never_holds_more_than_its_bound_and_never_names_a_wrong_server(
    history: list[tuple[str, str]], size_max: int
) -> None:
    servers = ResponseServers(size_max=size_max, kept_s=20.0)
    truth: dict[str, str] = {}
    for now, (response_id, server) in enumerate(history):
        servers.remember(response_id, server, float(now))
        truth[response_id] = server
        assert len(servers) <= size_max
        assert all(servers.server_of(known, now) in (None, truth[known]) for known in truth)
        assert servers.server_of(response_id, float(now)) == server
