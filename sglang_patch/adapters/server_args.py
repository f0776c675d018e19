"""Flags: SGLang parses what a plugin adds, but keeps dataclass fields only (server_args.py:7132),
so they go to the environment, which the scheduler processes inherit.
"""

import os
from collections.abc import Callable
from typing import Any

from sglang_patch.config import FLAGS, Config, ConfigError, read_config
from sglang_patch.plugin import apply_to_launch, is_compatible
from sglang_patch.refusals import refuse, server_refusals, stop


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Add the flags after SGLang's own."""
    result = original(parser)
    group = parser.add_argument_group("speculation switch (crossover)")
    for setting in FLAGS:
        kind = {"action": "store_true"} if setting.switch else {"metavar": setting.metavar}
        group.add_argument(
            setting.flag, dest=_dest(setting.flag), default=None, help=setting.help, **kind
        )
    return result


def from_cli_args(original: Callable[..., Any], cls: Any, args: Any) -> Any:
    """Export what was given (a flag beats the environment), and refuse what cannot work."""
    for setting in FLAGS:
        value = getattr(args, _dest(setting.flag), None)
        if value == "":
            stop(f"{setting.flag} is empty. Give it a value, or remove it.")
        if value is not None:
            os.environ[setting.variable] = "1" if value is True else str(value)
    current_config()  # before SGLang reads the model
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


def current_config() -> Config | None:
    """Read the environment, and end the process on what cannot be used."""
    try:
        return read_config(os.environ)
    except ConfigError as error:
        stop(str(error))


def _check(arguments: Any) -> None:
    config = current_config()
    if config is None or not is_compatible():
        return
    if refusals := server_refusals(arguments):
        refuse(refusals, asked_by=config.asked_by, optional=config.optional)
    apply_to_launch()
