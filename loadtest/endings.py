"""How the commands end: their exit codes, and one line where a user can mend what stopped them."""

import asyncio
import sys
from collections.abc import Callable

EXIT_DONE, EXIT_NOTHING, EXIT_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def ended(
    command: str,
    work: Callable[[], int],
    mendable: tuple[type[Exception], ...],
    stopped: str = "stopped",
) -> int:
    """Do a command's work and return its exit code.

    An error of a `mendable` kind, a missing package, and a file system that refuses are told in
    one line; so is Ctrl-C, in the words of `stopped`.
    """
    try:
        return work()
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'crossover-router[loadtest]'"
    except mendable as error:
        message = str(error)
    except OSError as error:
        refused = f"cannot write to {error.filename}: {error.strerror}"
        message = refused if error.filename is not None else str(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(command, stopped)
        return EXIT_INTERRUPTED
    say(command, message)
    return EXIT_INPUT


def say(command: str, message: str) -> None:
    """Tell the user something beside the results."""
    print(f"{command}: {message}", file=sys.stderr)
