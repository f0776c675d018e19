"""What a user is told about settings that cannot be used: one line per problem.

Each names where the value is from (a flag, a variable, a line of the file), the value, and what is
allowed instead.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from router.options import ENV_PREFIX

VALUE_CHARS_MAX = 80


def key_in_settings(instead: str) -> str:
    """Say why a key is not taken as a setting, and what takes it."""
    return f"settings files are passed around; use {instead}"


# Asked for often enough to deserve a better answer than "unknown".
_REFUSED = {
    "workers": "one process serves the node: only then does it know what is in flight",
    **{
        asked: "a key on the command line shows in the process list, and "
        + key_in_settings(f"{name}_file or environment {ENV_PREFIX}{name.upper()}")
        for asked, name in (
            ("api_key", "client_keys"),
            ("client_keys", "client_keys"),
            ("admin_key", "admin_key"),
            ("upstream_api_key", "upstream_api_key"),
            ("upstream_admin_key", "upstream_admin_key"),
        )
    },
}


class SettingsError(Exception):
    """Everything that is wrong with the settings, one line each, for the user."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def not_allowed(where: str, value: object, allowed: str) -> str:
    """Describe a value that its key does not take."""
    return f"{where}: {_shown(value)} is not allowed, expected {allowed}"


def unknown(where: str, name: str, known: Iterable[str]) -> str:
    """Describe a name that nothing has, with the nearest one that exists."""
    bare = name.removeprefix(ENV_PREFIX).lstrip("-").replace("-", "_").lower()
    if bare in _REFUSED:
        return f"{where}: not supported: {_REFUSED[bare]}"
    spelled = {_plain(word): word for word in known}
    near = get_close_matches(_plain(name), spelled, n=1, cutoff=0.6)
    hint = (
        f", did you mean {spelled[near[0]]}?" if near else f", known: {', '.join(spelled.values())}"
    )
    return f"{where}: unknown{hint}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _shown(value: object) -> str:
    """Show a value on one line, without what may be a password."""
    text = repr(value) if isinstance(value, str) else str(value)
    if "@" in text:
        return "a value with '@' (not shown: it may hold a password)"
    text = text.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."
