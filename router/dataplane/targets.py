"""Which servers a request may go to, where its client says so in `x-crossover-target`."""

from collections.abc import Iterable

from router.core.types import Role, ServerSpec


def meant(target: str, servers: Iterable[ServerSpec]) -> frozenset[str]:
    """Return the servers that a name or a role means; a name comes first. None: it means none."""
    by_name = {server.name: server for server in servers}
    if target in by_name:
        return frozenset({target})
    return frozenset(name for name, server in by_name.items() if server.role == target)


def words(servers: Iterable[ServerSpec]) -> list[str]:
    """Return all that a target may be, each once: names, then roles."""
    known = list(servers)
    roles = [str(role) for role in Role if any(server.role is role for server in known)]
    return list(dict.fromkeys([*(server.name for server in known), *roles]))
