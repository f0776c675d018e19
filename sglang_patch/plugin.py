"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` early in every process.

It runs before arguments are parsed (launch_server.py:64), and in each scheduler process
(scheduler.py:3999). With nothing set it registers what adds and reads the flags, and no more.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from sglang_patch import compat
from sglang_patch.config import ConfigError, is_optional, is_requested
from sglang_patch.hooks import FLAG_HOOKS, LAUNCH_HOOKS, LAUNCHER_HOOKS, SCHEDULER_HOOKS, Hook
from sglang_patch.refusals import Refusal, refuse, stop

logger = logging.getLogger(__name__)

_registered: set[str] = set()


def register() -> None:
    """Register the hooks that this process needs. Calling it again adds only what is new."""
    if differing := compat.mismatches(compat.find_installed(), FLAG_HOOKS):
        logger.warning("The speculation switch has no flags here: %s", "; ".join(differing))
    else:
        _register(FLAG_HOOKS)
    if not is_requested(os.environ) or not is_compatible():
        return
    _register(LAUNCHER_HOOKS)
    # Importing a worker's module before the scheduler's fails on an import cycle, and only the
    # scheduler's process needs those hooks. It imports its own module before it loads plugins.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _register(SCHEDULER_HOOKS)


def apply_to_launch() -> None:
    """Hook what starts the schedulers, once something is known to be asked for. It lies beyond what
    SGLang has imported when it loads plugins.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register(LAUNCH_HOOKS)
    HookRegistry.apply_hooks()


def is_compatible() -> bool:
    """Compare the hook table with the installed SGLang. A mismatch ends the process, unless that is
    optional.
    """
    found = compat.problems(compat.find_installed())
    if not found:
        return True
    refusal = Refusal(
        "this SGLang", "; ".join(found), "Install a tested version, or remove the switch's settings"
    )
    try:
        optional = is_optional(os.environ)
    except ConfigError as error:  # SGLang would swallow it
        stop(str(error))
    refuse((refusal,), asked_by="the speculation switch", optional=optional)
    return False


def unapplied(hooks: Iterable[Hook] = SCHEDULER_HOOKS) -> tuple[str, ...]:
    """Return the hooks whose targets are not wrapped: SGLang logs a failure to apply one and goes
    on.
    """
    return tuple(
        hook.path for hook in hooks if getattr(_resolve(hook), "__wrapped__", None) is None
    )


def _resolve(hook: Hook) -> Any:
    target: Any = importlib.import_module(hook.module)
    for name in hook.target.partition(":")[2].split("."):
        target = getattr(target, name)
    return target


def _register(hooks: Iterable[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook.path in _registered or hook.adapter is None:
            continue
        _registered.add(hook.path)
        HookRegistry.register(hook.path, _adapter(hook.adapter), HookType.AROUND)


def _adapter(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    adapter: Callable[..., Any] = getattr(
        importlib.import_module(f"sglang_patch.adapters.{module}"), function
    )
    return adapter
