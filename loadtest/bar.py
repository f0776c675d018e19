"""A progress bar, on a terminal only, and only if rich is installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from loadtest.record import Progress


@contextmanager
def bar(requests: int | None, duration_s: float | None) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows how far a run is, by its requests, else by its time."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=duration_s if requests is None else requests)

        def show(at: Progress) -> None:
            if at.warming:
                bars.update(task, description="warm-up")
                return
            done = at.elapsed_s if requests is None else at.finished
            bars.update(task, completed=done, description=describe(at, requests))

        yield show


def describe(at: Progress, requests: int | None) -> str:
    """Return a run's progress in words."""
    of = "" if requests is None else f" of {requests}"
    failed = f", {at.errors} failed" if at.errors else ""
    return f"{at.finished}{of} done, {at.in_flight} running, {at.tokens:.0f} tokens{failed}"
