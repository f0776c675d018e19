"""An engine's own description of itself, without what nobody else may know."""

import re
from typing import Any

import orjson

_HIDDEN = "***"
_SECRET = re.compile(
    r"(keys?|passwords?|passwd|secrets?|credentials?|token|authorization|extra_config)$",
    re.IGNORECASE,
)


def redact(body: bytes) -> bytes | None:
    """Return the JSON with the values of keys, passwords, tokens and free-form extras hidden.

    None if it is no JSON, or nested too deeply to be looked through.
    """
    try:
        return orjson.dumps(_redacted(orjson.loads(body)))
    except (orjson.JSONDecodeError, RecursionError):
        return None


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _hide(item) if _SECRET.search(key) else _redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return value


def _hide(value: Any) -> Any:
    """Hide what can hold a secret. That something is not set, or a number, is none."""
    return value if value is None or isinstance(value, bool | int | float) else _HIDDEN
