"""The start of the schedulers: where one of them refused, the launcher ends as it did."""

from collections.abc import Callable
from typing import Any

from sglang_patch.refusals import EXIT_CODE, RefusedError


def wait_for_scheduler_ready(
    original: Callable[..., Any], scheduler_pipe_readers: Any, scheduler_procs: Any
) -> Any:
    """End with the scheduler's exit code, which has said why, instead of the trace of a death
    (engine.py:1326-1355).
    """
    try:
        return original(scheduler_pipe_readers, scheduler_procs)
    except RuntimeError as error:
        if any(process.exitcode == EXIT_CODE for process in scheduler_procs):
            raise RefusedError(str(error)) from None
        raise
