"""Flags: SGLang parses what a plugin adds, but keeps dataclass fields only (server_args.py:7132),
so they go to the environment, which the scheduler processes inherit.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from sglang_patch.config import FLAGS, ConfigError, read_config
from sglang_patch.plugin import is_compatible
from sglang_patch.refusals import EXIT_CODE, refuse, server_refusals


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Add the flags after SGLang's own."""
    result = original(parser)
    group = parser.add_argument_group("speculation switch (crossover)")
    for setting in FLAGS:
        kind = {"action": "store_true"} if setting.switch else {"metavar": "N"}
        group.add_argument(
            setting.flag, dest=_dest(setting.flag), default=None, help=setting.help, **kind
        )
    return result


def from_cli_args(original: Callable[..., Any], cls: Any, args: Any) -> Any:
    """Export what was given (a flag beats the environment), and refuse what cannot work."""
    for setting in FLAGS:
        value = getattr(args, _dest(setting.flag), None)
        if value is not None:
            os.environ[setting.variable] = "1" if value is True else str(value)
    arguments = original(cls, args)
    _check(arguments)
    return arguments


def check_server_args(original: Callable[..., Any], arguments: Any) -> Any:
    """Refuse in the launcher where an Engine is built without parsing flags (engine.py:767)."""
    result = original(arguments)
    _check(arguments)
    return result


def _dest(flag: str | None) -> str:
    return (flag or "").lstrip("-").replace("-", "_")


def _check(arguments: Any) -> None:
    try:
        config = read_config(os.environ)
    except ConfigError as error:
        print(f"speculation switch: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None
    if config is None or not is_compatible():
        return
    if refusals := server_refusals(arguments):
        refuse(refusals, asked_by=config.asked_by, optional=config.optional)
