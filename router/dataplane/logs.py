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
import time
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

_request_logger = logging.getLogger(REQUEST_LOGGER)
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
    """Write the line of an ended request.

    It goes straight to the handlers of `configure`: logging would make a record of twenty fields
    for it first.
    """
    if _request_logger.isEnabledFor(logging.INFO):
        for handler in _request_logger.root.handlers:
            if isinstance(handler, BatchHandler):
                handler.put_request(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._stamp = 0, ""

    def format_request(self, record: RequestRecord, at: float) -> str:
        """Return the line of an ended request, without its end. Written out: one for each."""
        second = int(at)
        if second != self._second:
            self._stamp = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
            self._second = second
        r = record
        server = "" if r.server is None else f'"server":{_json(r.server)},'
        if r.reason is not None:
            server += f'"role":"{r.role}","reason":"{r.reason}",'
        ttft = "" if r.ttft_s is None else f'"ttft_s":{r.ttft_s:.6f},'
        waited = "" if r.waited is None else f'"waited":"{r.waited}","queue_s":{r.queue_s:.6f},'
        retry = "" if r.retry is None else f'"retry":"{r.retry}",'
        error = "" if r.error is None else f'"error":{_json(r.error)},'
        return (
            f'{{"time":"{self._stamp}.{int((at - second) * 1e3):03}+00:00","level":"info",'
            f'"logger":"{REQUEST_LOGGER}","message":"request","request_id":{_json(r.request_id)},'
            f'"endpoint":"{r.endpoint}","streaming":{"true" if r.streaming else "false"},'
            f'{server}{ttft}{waited}{retry}{error}"priority":"{r.priority}",'
            f'"outcome":"{r.outcome}","status":{r.status},"attempts":{r.attempts},'
            f'"sequences":{r.sequences},"prompt_tokens":{r.prompt_tokens},'
            f'"output_tokens":{r.output_tokens},'
            f'"tokens_exact":{"true" if r.tokens_exact else "false"},'
            f'"decision_s":{r.decision_s:.6f},'
            f'"duration_s":{r.duration_s:.6f}}}'
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
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
        line = f"{at:%H:%M:%S.%f}"[:-3] + f" {record.levelname.lower():7} {record.getMessage()}"
        line = _one_line(line)
        colour = _COLOURS.get(record.levelno) if self._colour else None
        if colour is not None:
            line = f"{colour}{line}\x1b[0m"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line

    def format_request(self, record: RequestRecord, at: float) -> str:
        """Return the line of an ended request, without its end."""
        known = [(name, getattr(record, name)) for name in _FIELDS]
        text = " ".join(f"{name}={_rounded(value)}" for name, value in known if value is not None)
        time = f"{datetime.fromtimestamp(at).astimezone():%H:%M:%S.%f}"[:-3]
        return _one_line(f"{time} info    {text}")


def _rounded(value: object) -> object:
    return round(value, 6) if type(value) is float else value


def _json(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return json.dumps(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.translate(_ESCAPES)


class BatchHandler(logging.Handler):
    """Formats at once, writes from a thread; a warning is written without delay."""

    def __init__(
        self,
        stream: IO[str],
        formatter: JsonFormatter | TextFormatter,
        lines_max: int = LINES_MAX,
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._formatter = formatter
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

    def put_request(self, record: RequestRecord) -> None:
        """Queue the line of an ended request, or drop it if the writer is stuck."""
        if len(self._lines) >= self._lines_max:
            self.dropped_lines += 1
        else:
            self._lines.append(self._formatter.format_request(record, time.time()))

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
    handler = BatchHandler(stream, TextFormatter(colour=terminal) if as_text else JsonFormatter())
    # Nothing of this is in a line, so none of it is looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)
    return handler


def set_level(level: str) -> None:
    """Write lines of this severity and above only."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    # They tell of each request and connection; what matters of that is in the request's own line.
    for name in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
