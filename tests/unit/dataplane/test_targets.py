"""What a target header means."""

from router.core.types import Role, ServerSpec
from router.dataplane.targets import meant, words

SERVERS = [
    ServerSpec("fast", Role.SPEC, "http://h:1"),
    ServerSpec("wide-1", Role.BASE, "http://h:2"),
    ServerSpec("wide-2", Role.BASE, "http://h:3"),
]


def test_a_target_is_a_name_or_a_role() -> None:
    assert meant("wide-1", SERVERS) == {"wide-1"}
    assert meant("base", SERVERS) == {"wide-1", "wide-2"}
    assert meant("Base", SERVERS) == frozenset()
    assert words(SERVERS) == ["fast", "wide-1", "wide-2", "spec", "base"]


def test_a_name_comes_before_a_role_and_is_told_once() -> None:
    servers = [ServerSpec("base", Role.SPEC, "http://h:1"), SERVERS[1]]
    assert meant("base", servers) == {"base"}
    assert words(servers) == ["base", "wide-1", "spec"]
