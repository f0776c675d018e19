"""A progress bar, on a terminal only, and only if rich is installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the requests done and failed so far."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda _done, _failed: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(done: int, failed: int) -> None:
            description = f"{failed} failed" if failed else ""
            progress.update(task, completed=done, description=description)

        yield show
