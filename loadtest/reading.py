"""Files that a load is made from: traces (arrivals and lengths) and prompts, line by line.

A line that cannot be used is left out, counted and named with its place; a file of which nothing
can be used is an error.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from loadtest.workload import Conversation

LINES_MAX = 1_000_000
TOKENS_MAX = 1_000_000
# SGLang and OpenAI count about so many bytes of English text to a token.
BYTES_PER_TOKEN = 4

_Item = TypeVar("_Item")
_Line = TypeVar("_Line")


class InputFileError(Exception):
    """A file that the load cannot be made from; the message says why, and what is allowed."""


@dataclass(slots=True)
class Reading:
    """What was left out of a file: how many lines, and the first few with their reasons."""

    path: str
    skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def skip(self, line: int, why: object) -> None:
        """Take note of a line that cannot be used."""
        self.skipped += 1
        if len(self.examples) < 3:
            self.examples.append(f"{self.path}:{line}: {why}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of a trace: seconds since its first request, prompt and output tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: str) -> tuple[list[Arrival], Reading]:
    """Read a trace in Azure's format, in the order of its times.

    Columns are TIMESTAMP (a date with time, or seconds), ContextTokens and GeneratedTokens; a first
    line that names them is passed over.
    """
    reading = Reading(path)
    lines = _each(csv.reader(_lines(path)), _trace_line, reading)
    if not lines:
        raise InputFileError(
            f"{_nothing(path, reading)}; a line is TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    lines.sort(key=lambda line: line[0])
    first = lines[0][0]
    return [Arrival(at_s - first, *lengths) for at_s, lengths in lines], reading


def _trace_line(fields: Sequence[str]) -> tuple[float, tuple[int, int]] | None:
    if not fields or fields[0].strip().upper() == "TIMESTAMP":
        return None
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields instead of 3")
    prompt, output = (int(text) for text in fields[1:])
    if not (1 <= prompt <= TOKENS_MAX and 1 <= output <= TOKENS_MAX):
        raise ValueError(f"tokens must be 1 to {TOKENS_MAX}, not {prompt} and {output}")
    return _seconds(fields[0].strip()), (prompt, output)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise ValueError(f"{text!r} is no time") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no time")
    return value


def read_prompts(path: str) -> tuple[list[Conversation], Reading]:
    """Read prompts, one JSON object a line, or one JSON array of them.

    OpenAI: `messages`, `prompt`, or a batch line with either in its `body`. ShareGPT:
    `conversations` of `from` and `value`.
    """
    reading = Reading(path)
    found = _each(_objects(path), _conversation, reading)
    if not found:
        raise InputFileError(
            f"{_nothing(path, reading)}; a line is a JSON object with messages, prompt or "
            "conversations"
        )
    return found, reading


def _objects(path: str) -> Iterator[object]:
    lines = _lines(path)
    first = next(lines, "")
    if not first.lstrip().startswith("["):
        yield first
        yield from lines
        return
    try:
        found = json.loads(first + "".join(lines))
    except ValueError as error:
        raise InputFileError(f"{path} is no JSON: {error}") from None
    yield from ({} if item is None else item for item in found)


def _conversation(item: object) -> Conversation | None:
    if isinstance(item, str):
        if not item.strip():
            return None
        item = json.loads(item)
    if not isinstance(item, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - of the file's, not of the program's
    body = item.get("body")
    if isinstance(body, dict):
        item = body
    if isinstance(item.get("prompt"), str) and item["prompt"]:
        return Conversation((item["prompt"],), (_limit(item),))
    if isinstance(item.get("messages"), list):
        return _of_messages([_message(m, "role", "content") for m in item["messages"]], item)
    if isinstance(item.get("conversations"), list):
        return _of_messages([_message(m, "from", "value") for m in item["conversations"]], item)
    raise ValueError("neither messages nor prompt nor conversations")


def _of_messages(messages: Sequence[tuple[str, str]], item: dict[str, object]) -> Conversation:
    turns: list[str] = []
    answers: list[int | None] = []
    system = None
    for role, text in messages:
        if role in ("system", "developer"):
            system = text
        elif role in ("user", "human"):
            turns.append(text)
            answers.append(_limit(item))
        elif role in ("assistant", "gpt") and answers and text:
            answers[-1] = max(len(text.encode()) // BYTES_PER_TOKEN, 1)
    if not turns:
        raise ValueError("nothing that a user says")
    return Conversation(tuple(turns), tuple(answers), system)


def _message(message: object, role: str, text: str) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get(role), str):
        raise ValueError(f"a message without {role!r}")  # noqa: TRY004 - as above
    content = message.get(text)
    if isinstance(content, list):  # parts: their texts
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message whose {text!r} is no text")
    return message[role], content or ""


def _limit(item: dict[str, object]) -> int | None:
    value = item.get("max_completion_tokens", item.get("max_tokens"))
    return value if type(value) is int and 1 <= value <= TOKENS_MAX else None


def _each(
    lines: Iterator[_Line], read: Callable[[_Line], _Item | None], reading: Reading
) -> list[_Item]:
    items: list[_Item] = []
    number = 0
    while number < LINES_MAX:
        number += 1
        try:
            line = next(lines, None)
            if line is None:
                break
            if (item := read(line)) is not None:
                items.append(item)
        except (ValueError, csv.Error) as error:
            reading.skip(number, error)
    return items


def _lines(path: str) -> Iterator[str]:
    try:
        with Path(path).open(encoding="utf-8", errors="replace", newline="") as file:
            yield from file
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from None


def _nothing(path: str, reading: Reading) -> str:
    if not reading.skipped:
        return f"{path} is empty"
    return f"no line of {path} can be used ({reading.examples[0]})"
