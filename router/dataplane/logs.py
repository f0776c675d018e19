"""The log: JSON lines for machines, text for a terminal; one line per request.

Nothing a client sends can forge a line: JSON escapes it, and text has its control characters
escaped. No prompt, answer, key or header is ever logged. Lines are formatted where they arise and
written by a thread, in batches, so that a slow reader of stdout never stalls the event loop; of
what a stuck reader does not take, the newest lines are dropped and counted.
"""

import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import IO, Any, Final

import orjson

from router.dataplane.record import RequestRecord

LINES_MAX = 20_000
FLUSH_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 2.0

REQUEST_LOGGER: Final = "crossover.request"

_FIELDS = tuple(field.name for field in fields(RequestRecord))
_COLOURS: Mapping[int, str] = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31;1m",
}
# What some reader takes for the end of a line, or a terminal for a command; as JSON escapes it.
_ESCAPES = {
    code: f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0xD800, 0xE000))
}


def log_request(record: RequestRecord) -> None:
    """Write the line of an ended request."""
    logger = logging.getLogger(REQUEST_LOGGER)
    if logger.isEnabledFor(logging.INFO):
        # Made by hand: `logger.info` walks the stack for the place of the call, at every request.
        line = logging.LogRecord(REQUEST_LOGGER, logging.INFO, __file__, 0, "request", (), None)
        line.request = record
        logger.handle(line)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            line.update(request_fields(request))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return _one_line(orjson.dumps(line, default=str).decode())
        except TypeError:  # half a surrogate pair, which is no UTF-8
            return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line for a reader, coloured by severity if `colour`."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        at = datetime.fromtimestamp(record.created).astimezone()
        text = record.getMessage()
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            text = " ".join(f"{key}={value}" for key, value in request_fields(request).items())
        line = f"{at:%H:%M:%S.%f}"[:-3] + f" {record.levelname.lower():7} {text}"
        line = _one_line(line)
        colour = _COLOURS.get(record.levelno) if self._colour else None
        if colour is not None:
            line = f"{colour}{line}\x1b[0m"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """Return what is known of a request, times rounded to microseconds."""
    known: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(record, name)
        if value is not None:
            known[name] = round(value, 6) if type(value) is float else value
    return known


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.translate(_ESCAPES)


class BatchHandler(logging.Handler):
    """Formats at once, writes from a thread; a warning is written without delay."""

    def __init__(self, stream: IO[str], lines_max: int = LINES_MAX) -> None:
        super().__init__()
        self.dropped_lines = 0
        self._stream = stream
        self._lines: deque[str] = deque()
        self._lines_max = lines_max
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or drop it if the writer is stuck."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  (a log line must never break a request)
            self.handleError(record)
            return
        if len(self._lines) >= self._lines_max:
            self.dropped_lines += 1
            return
        self._lines.append(line)
        if record.levelno >= logging.WARNING:
            self._wake.set()

    def close(self) -> None:
        """Write what is queued, and end the thread; a stuck reader is not waited for."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        super().close()

    def _write(self) -> None:
        while not self._closing or self._lines:
            self._wake.wait(FLUSH_INTERVAL_S)
            self._wake.clear()
            batch = [self._lines.popleft() for _ in range(len(self._lines))]
            # Nobody reads stdout any more: nothing sensible can be done with the lines.
            with suppress(OSError, ValueError):
                if batch:
                    self._stream.write("\n".join(batch) + "\n")
                    self._stream.flush()


def configure(log_format: str, level: str, stream: IO[str] | None = None) -> BatchHandler:
    """Send all logging to `stream`, stdout by default. The caller closes the handler."""
    stream = sys.stdout if stream is None else stream
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a terminal may know ASCII only
    terminal = stream.isatty()
    as_text = log_format == "text" or (log_format == "auto" and terminal)
    handler = BatchHandler(stream)
    handler.setFormatter(TextFormatter(colour=terminal) if as_text else JsonFormatter())
    # Nothing of this is in a line, so none of it is looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # They tell of each request and connection; what matters of that is in the request's own line.
    for name in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    return handler
