"""Server-sent events, as bytes that pass by: the first event, errors among them, the stream's end.

Bytes are never decoded or rewritten. Line ends may be LF, CRLF or CR.
"""

import re
from dataclasses import dataclass
from typing import Any

import orjson

from router.dataplane.asgi import Headers

HOLD_BYTES_MAX = 64 * 1024
TAIL_BYTES = 64
_END_BYTES = 1024  # the end of a stream, and comments behind it

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_ERROR_LINE = re.compile(rb'[\r\n](?:data: ?\{ ?"error"|event: ?error)')
_DATA_LINE = re.compile(rb"(?:^|[\r\n])data:[ ]?([^\r\n]*)")


def is_event_stream(content_type: bytes) -> bool:
    """Whether a content-type header announces server-sent events."""
    return content_type[:17].lower() == b"text/event-stream"


def first_event(buffer: bytes) -> bytes | None:
    """Return the first complete event that carries data, None while there is none.

    Blocks without data, such as comments that keep a connection alive, are no events.
    """
    start = 0
    while (end := _BLANK_LINE.search(buffer, start)) is not None:
        block = buffer[start : end.start()]
        if _DATA_LINE.search(block):
            return block
        start = end.end()
    return None


def event_data(event: bytes) -> bytes:
    """Return the data of one event, its lines joined."""
    return b"\n".join(_DATA_LINE.findall(event))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that an engine reports in a stream, as the response that it should have been."""

    status: int
    data: bytes

    def body(self) -> bytes:
        """Return the JSON of it."""
        return self.data

    def headers(self) -> Headers:
        """Return the response headers that belong to it, but for the length of its body."""
        headers = [(b"content-type", b"application/json")]
        if self.status in (429, 503):
            headers.append((b"retry-after", b"1"))
        return headers


def refusal(event: bytes) -> Refusal | None:
    """Return what a first event refuses, None if it reports no error with an HTTP status.

    SGLang answers a streamed request that it refuses with 200 and, as the only event, `{"error":
    {..., "code": 503}}`; on `/generate` with a `finish_reason` of type `abort` that has a
    `status_code`.
    """
    if b'"error"' not in event and b'"abort"' not in event:
        return None
    data = event_data(event)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    status = _field(_field(value, "error"), "code")
    if _is_error(status):
        return Refusal(status, data)
    reason = _field(_field(value, "meta_info"), "finish_reason")
    status = _field(reason, "status_code")
    if _field(reason, "type") == "abort" and _is_error(status):
        error = {
            "message": _field(reason, "message"),
            "type": _field(reason, "err_type"),
            "param": None,
            "code": status,
        }
        return Refusal(status, orjson.dumps({"error": error}))
    return None


def reports_error(before: bytes, data: bytes) -> bool:
    """Whether an event that reports an error begins in `data`, or ends its beginning there.

    `before` is what `tail` returned of the bytes before. No text of a model's can look like one: it
    has no line ends. Called per chunk, so by `find`: `in` raises and drops an exception inside,
    where bytes are looked for in bytes.
    """
    if data.find(b"error") < 0 and before.endswith(b"\n"):
        return False
    start = before[-TAIL_BYTES:] if len(before) >= TAIL_BYTES else b"\n" + before
    return _ERROR_LINE.search(start + data) is not None


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _is_error(status: Any) -> bool:
    return isinstance(status, int) and 400 <= status <= 599


def tail(before: bytes, data: bytes) -> bytes:
    """Return the end of a stream, given its end before the next bytes. Called per chunk."""
    return data if len(data) >= TAIL_BYTES else (before + data)[-TAIL_BYTES:]


def ends_with(end: bytes, marker: bytes) -> bool:
    """Whether the last line, but for comments, ends with `marker`.

    `end` is what `tail` returned.
    """
    for line in reversed(end[-_END_BYTES:].splitlines()):
        if line and not line.startswith(b":"):
            return line.endswith(marker)
    return False


def closing(end: bytes) -> bytes:
    """Return what ends the event that a stream with this end stands in; nothing between events."""
    if not end or end.endswith((b"\n\n", b"\r\r", b"\n\r\n")):
        return b""
    return b"\n" if end.endswith((b"\n", b"\r")) else b"\n\n"
