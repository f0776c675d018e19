"""Counts what a streamed answer carries without parsing it: bytes in, events and their times out.

An event counts if it carries text; role, finish reason, usage and `[DONE]` do not. An event is not
a token: a speculating engine sends a step's tokens in one. The token count is in the final usage,
the one JSON parsed.
"""

import json
import re
from array import array

_TEXT = re.compile(rb'"(?:content|reasoning_content|text|arguments)": ?"[^"]')
_END = b"\n\n"
EVENT_BYTES_MAX = 1 << 20
GAPS_MAX = 1 << 16


class Tally:
    """Running counts of one answer, in chunks cut anywhere; times are the caller's seconds."""

    __slots__ = (
        "_carry",
        "_kept",
        "_usage_events",
        "done",
        "error_event",
        "events",
        "first",
        "gaps",
        "last",
    )

    def __init__(self, *, keep_text: bool = False) -> None:
        self.events = 0
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: array[float] = array("d")
        self.done = False
        self.error_event: bytes | None = None
        self._carry = b""
        self._usage_events = b""
        self._kept: list[bytes] | None = [] if keep_text else None

    def feed(self, data: bytes, now: float) -> None:
        """Take a chunk of the body; raise ValueError if an event exceeds EVENT_BYTES_MAX."""
        if self._carry or not data.endswith(_END) or b"\r" in data:
            data = self._whole_events(data)
            if not data:
                return
        texts = len(_TEXT.findall(data))
        if texts:
            self._count(texts, now)
            if self._kept is not None:
                self._kept.append(data)
        if b'"completion_tokens"' in data:
            self._usage_events = data
        if data.endswith(b"[DONE]\n\n"):
            self.done = True
        if b'data: {"error"' in data:
            self.error_event = data

    def _whole_events(self, data: bytes) -> bytes:
        """Return the events that are complete now, and keep the rest for later."""
        data = self._carry + data.replace(b"\r", b"")  # JSON escapes its own
        end = data.rfind(_END)
        end = 0 if end < 0 else end + len(_END)
        self._carry = data[end:]
        if len(self._carry) > EVENT_BYTES_MAX:
            raise ValueError(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        return data[:end]

    def _count(self, texts: int, now: float) -> None:
        if self.last is None:
            self.first = now
            gaps = texts - 1
        else:
            gaps = texts
            if len(self.gaps) < GAPS_MAX:
                self.gaps.append(now - self.last)
            gaps -= 1
        # Events that arrive together are no time apart.
        for _ in range(min(gaps, GAPS_MAX - len(self.gaps))):
            self.gaps.append(0.0)
        self.last = now
        self.events += texts

    def usage(self) -> tuple[int | None, int | None]:
        """Return prompt and completion tokens as the last usage says."""
        for line in reversed(self._usage_events.split(b"\n")):
            if b'"completion_tokens"' in line:
                try:
                    event = json.loads(line.removeprefix(b"data:"))
                    usage = event.get("usage") or event["meta_info"]
                    return int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    return None, None
        return None, None

    def text(self) -> str:
        """Return the answer's text, if it was to be kept: of `/generate`, all text to date."""
        text = ""
        for line in b"".join(self._kept or ()).split(b"\n"):
            try:
                event = json.loads(line.removeprefix(b"data:"))
                if "meta_info" in event:
                    text = str(event["text"])
                    continue
                for choice in event["choices"]:
                    text += choice.get("delta", choice).get("content") or choice.get("text") or ""
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return text

    def error_message(self) -> str | None:
        """Return what the stream's error event says, cut to one line."""
        if self.error_event is None:
            return None
        found = re.search(rb'"message": ?"([^"]*)"', self.error_event)
        text = found[1] if found else self.error_event
        return text.decode(errors="replace").strip()[:200]
