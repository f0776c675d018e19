"""The log: one line per request, whatever is in it; nothing that stalls the event loop."""

import dataclasses
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from router.core.admission import Priority, Waited
from router.core.types import Outcome, Reason, Role
from router.dataplane.logs import BatchHandler, JsonFormatter, TextFormatter, configure, log_request
from router.dataplane.record import Refusal, RequestRecord

HOSTILE = 'a\nb\r\x1b[31m"\u2028\x85\x00{'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def logging_to(
    stream: io.StringIO, log_format: str = "auto", level: str = "info"
) -> Iterator[None]:
    root = logging.getLogger()
    before, level_before = root.handlers[:], root.level
    handler = configure(log_format, level, stream)
    try:
        yield
    finally:
        handler.close()
        root.handlers[:] = before
        root.setLevel(level_before)


def record(request_id: str = "r-1") -> RequestRecord:
    return RequestRecord(
        request_id,
        "/v1/chat/completions",
        streaming=True,
        server="spec",
        role=Role.SPEC,
        reason=Reason.BELOW_THRESHOLD,
        outcome=Outcome.OK,
        status=200,
        attempts=1,
        output_tokens=7,
        ttft_s=0.12345678,
    )


def test_a_request_is_one_json_line_with_decision_and_reason() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        log_request(record())
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["request_id"] == "r-1"
    assert (fields["server"], fields["role"]) == ("spec", "spec")
    assert (fields["reason"], fields["outcome"]) == ("below_threshold", "ok")
    assert fields["ttft_s"] == 0.123457
    assert "error" not in fields


@pytest.mark.parametrize(
    "known",
    [
        record(),
        RequestRecord("r-2", "other"),
        RequestRecord(
            "r-4",
            "other",
            retry=Refusal.CONNECT,
            priority=Priority.BATCH,
            waited=Waited.SERVED,
            queue_s=0.25,
        ),
        RequestRecord("r-3", "/server_info", server='a"b\\', ttft_s=None, error='no "x"\n\u2028'),
    ],
)
def test_the_json_line_has_every_known_field(known: RequestRecord) -> None:
    stream = io.StringIO()
    with logging_to(stream):
        log_request(known)
    told = json.loads(stream.getvalue())
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    assert {key: told.pop(key) for key in ("level", "logger", "message")} == {
        "level": "info",
        "logger": "crossover.request",
        "message": "request",
    }
    assert datetime.fromisoformat(told.pop("time")).tzinfo is UTC
    assert told == {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


def test_a_terminal_gets_text_and_auto_elsewhere_is_json() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with logging_to(stream):
            logging.getLogger("x").warning("hello")
    assert "\x1b[33m" in terminal.getvalue()
    assert json.loads(pipe.getvalue())["message"] == "hello"


def test_text_that_is_not_for_a_terminal_has_no_colour() -> None:
    stream = io.StringIO()
    with logging_to(stream, "text"):
        logging.getLogger("x").warning("hello")
    assert stream.getvalue().endswith("warning hello\n")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("text", [HOSTILE, "half a pair \ud800"])
def test_nothing_in_a_request_can_forge_a_line(log_format: str, text: str) -> None:
    stream = io.StringIO()
    with logging_to(stream, log_format):
        log_request(record(text))
        logging.getLogger("x").info("told: %s", text)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    if log_format == "json":
        assert json.loads(lines[0])["request_id"] == text


def test_the_level_is_respected() -> None:
    stream = io.StringIO()
    with logging_to(stream, level="warning"):
        log_request(record())
        logging.getLogger("httpx").info("a request of our own")
    assert stream.getvalue() == ""


class StuckStream(io.StringIO):
    """Blocks its writer until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        self.go.wait()
        return super().write(text)


def test_a_stuck_reader_costs_lines_and_not_time() -> None:
    stream = StuckStream()
    handler = BatchHandler(stream, JsonFormatter(), lines_max=10)
    handler.setFormatter(TextFormatter(colour=False))
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "first", (), None))
    assert stream.writing.wait(10)
    for _ in range(15):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "more", (), None))
    assert handler.dropped_lines == 5
    stream.go.set()
    handler.close()
    assert len(stream.getvalue().splitlines()) == 11


def test_a_closed_stream_does_not_hurt() -> None:
    stream = io.StringIO()
    handler = BatchHandler(stream, JsonFormatter())
    handler.setFormatter(JsonFormatter())
    stream.close()
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "gone", (), None))
    handler.close()
    assert handler.dropped_lines == 0


def test_a_traceback_is_within_its_json_line() -> None:
    formatter = JsonFormatter()
    error = ValueError("x")
    told = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (ValueError, error, None))
    line = formatter.format(told)
    assert "ValueError: x" in json.loads(line)["traceback"]
    assert "\n" not in line
