"""What a person sees while the demo runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from loadtest.record import Progress, RequestRow

REFRESH_S = 0.25
LINE_EVERY_S = 2.0
RATE_WINDOW_S = 1.0
DECISIONS_SHOWN = 6
_LOOK_BACK_ROWS = 40


@dataclass(frozen=True, slots=True)
class Look:
    """One moment of a run: `share` of the whole demo is done; rates are in engine time."""

    run: str
    number: int
    runs: int
    seconds: float
    share: float
    wanted: int
    progress: Progress
    tok_s: float
    decisions: Sequence[RequestRow]


class View(Protocol):
    """Where progress is shown."""

    def say(self, text: str) -> None:
        """Say what happens next."""
        ...

    def show(self, look: Look) -> None:
        """Show a run under way."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Rate:
    """Tokens per second over about the last second."""

    def __init__(self, clock: float) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def update(self, elapsed_s: float, tokens: float) -> float:
        """Take a reading and return the rate, in engine time."""
        self._seen.append((elapsed_s, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= elapsed_s - RATE_WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        span_s = (elapsed_s - then) * self._clock
        # Estimates of unfinished requests are corrected when they finish: never show less than 0.
        return max(tokens - before, 0.0) / span_s if span_s > 0 else 0.0


def decisions(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Return the latest requests whose server is known, newest first."""
    known = [row for row in rows[-_LOOK_BACK_ROWS:] if row.server is not None]
    return known[: -DECISIONS_SHOWN - 1 : -1]


class Lines:
    """A line now and then, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = -LINE_EVERY_S

    def say(self, text: str) -> None:
        """Write the text as a line."""
        print(text, file=self._stream, flush=True)

    def show(self, look: Look) -> None:
        """Write a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._last < LINE_EVERY_S:
            return
        self._last = now
        progress = look.progress
        servers = ", ".join(
            f"{name or 'in prefill'} {server.in_flight}"
            for name, server in progress.servers.items()
            if server.in_flight
        )
        self.say(
            f"  {look.run} ({look.number}/{look.runs}) {progress.elapsed_s:5.1f} s: "
            f"{progress.in_flight} in flight ({servers or 'none'}), {look.tok_s:,.0f} tok/s, "
            f"{progress.errors} errors"
        )

    def close(self) -> None:
        """Nothing to leave."""


class Screen:
    """A table that is drawn over itself."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        """Print above the table."""
        self._console.print(text, highlight=False, markup=False)

    def show(self, look: Look) -> None:
        """Draw the table anew."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = look.progress
        head = Text.assemble(
            (f"{look.run}", "bold"),
            f"  run {look.number} of {look.runs}   ",
            f"{progress.elapsed_s:.1f} of {look.seconds:.0f} s   ",
            f"load {look.wanted}   ",
            (f"{look.tok_s:,.0f} tok/s", "bold green"),
            f"   {progress.finished} requests done",
            (f"   {progress.errors} errors" if progress.errors else "", "bold red"),
        )
        servers = Table.grid(padding=(0, 2))
        for name, server in progress.servers.items():
            servers.add_row(
                Text(name or "in prefill", style="cyan"),
                f"{server.in_flight:3d} in flight",
                Text("█" * min(server.in_flight, 64), style="cyan"),
                f"{server.requests} requests" if name else "",
            )
        chosen = Table.grid(padding=(0, 2))
        for row in look.decisions:
            chosen.add_row(
                Text(f"{row.sent_s:6.2f} s", style="dim"), f"to {row.server}", row.reason or ""
            )
        bar = ProgressBar(total=1.0, completed=min(look.share, 1.0))
        page = Table.grid(expand=True)
        for part in (head, bar, servers, Text("latest decisions", style="dim"), chosen):
            page.add_row(part)
        self._live.update(page, refresh=True)

    def close(self) -> None:
        """Take the table off the screen."""
        self._live.stop()


def make_view(stream: TextIO | None = None) -> View:
    """Return the view that suits the stream: stderr, unless given."""
    stream = sys.stderr if stream is None else stream
    return Screen(stream) if stream.isatty() else Lines(stream)
