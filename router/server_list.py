"""The engine servers of a configuration: from a YAML list or from URLs by role, and checked."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from router.core.types import Layout, Role, ServerSpec
from router.kinds import KEY_FILE, PEM_FILE, SEQUENCES, TOKENS, Kind, Text, Url, YesNo
from router.problems import key_in_settings, not_allowed, unknown
from router.settings import NO_SERVER
from router.yaml_file import YamlFile

SERVERS = "servers"
SERVERS_MAX = 64
GPU_INDEX_MAX = 1023

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class Placed:
    """A server, the place in the configuration that it is from, and how it lets the router in.

    `access` has the values of `ACCESS_KEYS` that are given for this server alone.
    """

    server: ServerSpec
    where: str
    access: Mapping[str, Any] = field(default_factory=dict)


def by_role(urls: Mapping[Role, Sequence[str]], origins: Mapping[Role, str]) -> list[Placed]:
    """Name servers after their role, with a number where it has several."""
    return [
        Placed(
            ServerSpec(str(role) if len(urls[role]) == 1 else f"{role}-{number}", role, url),
            origins[role],
        )
        for role in Role
        for number, url in enumerate(urls[role], start=1)
    ]


def listed(file: YamlFile, problems: list[str]) -> list[Placed]:
    """Read the list `servers` of the file; append what is wrong to `problems`."""
    items = file.values[SERVERS]
    if not isinstance(items, list) or not 1 <= len(items) <= SERVERS_MAX:
        allowed = f"a list of 1 to {SERVERS_MAX} servers"
        problems.append(not_allowed(file.where(SERVERS), items, allowed))
        return []
    servers = [_server(file, f"{SERVERS}[{i}]", item, problems) for i, item in enumerate(items)]
    return [server for server in servers if server is not None]


def check(servers: Sequence[Placed], layout: Layout, problems: list[str]) -> None:
    """Append to `problems` what cannot be true of these servers together."""
    for key in ("name", "url"):
        first: dict[str, Placed] = {}
        for placed in servers:
            value = getattr(placed.server, key)
            if value in first:
                problems.append(
                    f"{placed.where}: {key} {value!r} is also that of {first[value].where},"
                    f" expected each {key} once"
                )
            first.setdefault(value, placed)
    _check_gpus([placed for placed in servers if placed.server.gpus], layout, problems)


def _check_gpus(servers: Sequence[Placed], layout: Layout, problems: list[str]) -> None:
    for index, later in enumerate(servers):
        for earlier in servers[:index]:
            ours, theirs = set(later.server.gpus), set(earlier.server.gpus)
            if layout is Layout.DISJOINT and ours & theirs:
                problems.append(
                    f"{later.where}: gpus {sorted(ours & theirs)} are also those of"
                    f" {earlier.where}, expected others with layout disjoint"
                )
            elif layout is Layout.SHARED and ours != theirs:
                problems.append(
                    f"{later.where}: gpus {sorted(ours)} are not the {sorted(theirs)} of"
                    f" {earlier.where}, expected the same with layout shared"
                )


def _server(file: YamlFile, path: str, item: object, problems: list[str]) -> Placed | None:
    where = file.where(path)
    if not isinstance(item, dict):
        problems.append(not_allowed(where, item, f"a mapping of {', '.join(SERVER_KEYS)}"))
        return None
    before = len(problems)
    problems.extend(
        _unknown(file.where(f"{path}.{key}"), key) for key in item if key not in SERVER_KEYS
    )
    problems.extend(f"{where}: {key} is missing" for key in _NEEDED if key not in item)
    values: dict[str, Any] = {}
    for key, (read, allowed) in (*_KEYS.items(), *_ACCESS_READERS.items()):
        if key in item:
            try:
                values[key] = read(item[key])
            except ValueError:
                problems.append(not_allowed(file.where(f"{path}.{key}"), item[key], allowed))
    if len(problems) > before:
        return None
    access = {key: values.pop(key) for key in ACCESS_KEYS if key in values}
    return Placed(ServerSpec(**values), where, access)


def _unknown(where: str, key: object) -> str:
    name = str(key)
    bare = name.replace("-", "_").lower()
    if bare in _KEYS_OF_SERVER:
        return f"{where}: not supported: {key_in_settings(f'{bare}_file or {bare}_env')}"
    return unknown(where, name, SERVER_KEYS)


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value == NO_SERVER:
        raise ValueError
    return value


def _gpus(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError
    if any(not isinstance(gpu, int) or isinstance(gpu, bool) for gpu in value):
        raise ValueError
    if min(value) < 0 or max(value) > GPU_INDEX_MAX or len(set(value)) < len(value):
        raise ValueError
    return tuple(value)


# Not in the file themselves: a file or a variable has them.
_KEYS_OF_SERVER = ("api_key", "admin_key")
_NEEDED = ("name", "role", "url")
_KEYS: Mapping[str, tuple[Callable[[Any], object], str]] = MappingProxyType(
    {
        "name": (_name, f"1 to 32 of a-z 0-9 . _ - (not first), and not {NO_SERVER!r}"),
        "role": (Role, f"one of {', '.join(Role)}"),
        "url": (Url().from_yaml, Url().allowed),
        "gpus": (_gpus, "a list of device indices, each once, such as [0, 1, 2, 3]"),
        "sequences_max": (SEQUENCES.from_yaml, SEQUENCES.allowed),
        "prefill_tokens_max": (TOKENS.from_yaml, TOKENS.allowed),
    }
)
_VARIABLE = Text("the name of an environment variable with the key", "NAME")
ACCESS_KEYS: Mapping[str, Kind] = MappingProxyType(
    {
        "api_key_file": KEY_FILE,
        "api_key_env": _VARIABLE,
        "admin_key_file": KEY_FILE,
        "admin_key_env": _VARIABLE,
        "ca_file": PEM_FILE,
        "cert_file": PEM_FILE,
        "cert_key_file": PEM_FILE,
        "verify": YesNo(),
    }
)
_ACCESS_READERS = {key: (kind.from_yaml, kind.allowed) for key, kind in ACCESS_KEYS.items()}
SERVER_KEYS: Sequence[str] = (*_KEYS, *ACCESS_KEYS)
