"""What the router reads of a request body, and the one key that it may add to it.

One parse, for the few facts that steering needs. The body itself goes on as it came: a key is
spliced in behind the opening brace, nothing is ever serialised again. A body that is no JSON object
is none of our business; the engine's own error is the honest answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.core.types import RequestShape
from router.dataplane.paths import Inference

# A body beyond this is relayed unread: parsing it would hold up every stream for too long.
PARSE_BYTES_MAX = 16 * 2**20
# So is one with more values than these, whatever its size: lists and objects cost most.
_COMMAS_MAX = 1_000_000
_BRACKETS_MAX = 200_000
# What a client claims must not be able to drown the load of others.
SEQUENCES_MAX = 4096
_BYTES_PER_TOKEN = 4
_DEPTH_MAX = 16
# How much of a conversation's opening tells it from others.
_OPENING_CHARS_MAX = 4096
_OPENING_MESSAGES_MAX = 8

_NOTHING = RequestShape(sequences=0)


@dataclass(frozen=True, slots=True)
class Peek:
    """The facts of one body. `abortable`: the engine would take an id of ours for it.

    `continues` is the stored response that it goes on from.
    """

    shape: RequestShape
    stream: bool = False
    abortable: bool = False
    continues: str | None = None


def peek(body: bytes, route: Inference, session: bytes | None = None) -> Peek:
    """Read a body once. `session` is what the client calls its conversation, if it does."""
    if not route.prompt_keys:
        return Peek(_NOTHING)
    value = _parse(body)
    if value is None:
        return Peek(RequestShape(prompt_tokens=len(body) // _BYTES_PER_TOKEN))
    sampling = value.get("sampling_params")
    options = sampling if isinstance(sampling, dict) else {}
    prompts, batch = _prompts(value, route)
    n = _count(value.get("n")) or _count(options.get("n")) or 1
    sizes = [_tokens(prompt) for prompt in prompts]
    shape = RequestShape(
        sequences=min(n * len(sizes), SEQUENCES_MAX),
        prompt_tokens=sum(sizes),
        max_tokens=_max_tokens(value, options),
        longest_prompt_tokens=max(sizes) if len(sizes) > 1 else None,
        session=hash(session) if session else _session(value, route),
    )
    abortable = (
        route.rid_key is not None
        and route.rid_key not in value
        and n == 1
        and value.get("n") in (None, 1)  # an engine may read "2" as 2
        and not batch
        and not isinstance(sampling, list)
        and not value.get("background")
    )
    continues = value.get(route.continues_key) if route.continues_key is not None else None
    if not isinstance(continues, str):
        continues = None
    return Peek(shape, value.get("stream") is True, abortable, continues)


def splice(body: bytes, key: str, value: str) -> bytes:
    """Return the body with one more key in front.

    It must be a JSON object; `key` and `value` plain ASCII.
    """
    brace = body.index(b"{") + 1
    rest = body[brace:]
    comma = b"" if rest.lstrip(b" \t\r\n").startswith(b"}") else b","
    return b"".join((body[:brace], f'"{key}":"{value}"'.encode("ascii"), comma, rest))


def _parse(body: bytes) -> dict[str, Any] | None:
    if not body or _is_too_much(body):
        return None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _is_too_much(body: bytes) -> bool:
    """Whether parsing could take more than some tenths of a second."""
    return len(body) > PARSE_BYTES_MAX or (
        len(body) > _BRACKETS_MAX
        and (body.count(b"[") + body.count(b"{") > _BRACKETS_MAX or body.count(b",") > _COMMAS_MAX)
    )


def _prompts(value: Mapping[str, Any], route: Inference) -> tuple[Sequence[Any], bool]:
    """Return the prompts, at least one, and whether the engine takes them for a batch."""
    parts = [value[key] for key in route.prompt_keys if value.get(key) is not None]
    if route.conversation:
        return [parts], False
    prompt = parts[0] if parts else None
    if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt):
        return [prompt], False
    return prompt, True


def _session(value: Mapping[str, Any], route: Inference) -> int | None:
    """Return a hash of how a conversation opens, up to its first user's message.

    Its later requests open alike; so may another conversation's, which does little harm.
    """
    messages = value.get("messages") if route.conversation else None
    if not isinstance(messages, list):
        return None
    opening: list[str] = []
    for message in messages[:_OPENING_MESSAGES_MAX]:
        if not isinstance(message, dict):
            return None
        content = message.get("content")
        for part in content if isinstance(content, list) else ({"text": content},):
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                opening.append(text[:_OPENING_CHARS_MAX])
        if message.get("role") == "user":
            return hash(tuple(opening)) if opening else None
    return None


def _tokens(prompt: Any, depth: int = 0) -> int:
    """Estimate the tokens of a prompt: its text in bytes by a usual ratio, or its token ids."""
    if isinstance(prompt, str):
        return _text_bytes(prompt) // _BYTES_PER_TOKEN + 1
    if depth == _DEPTH_MAX:
        return 0
    total = 0
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], int):
            return len(prompt)
        for item in prompt:
            total += _tokens(item, depth + 1)
    elif isinstance(prompt, dict):
        for key, item in prompt.items():
            if key not in _NO_TEXT:
                total += _tokens(item, depth + 1)
    return total


# Pictures and sound cost tokens by their size on a screen or in seconds, not by their bytes.
_NO_TEXT = frozenset({"image_url", "image", "video_url", "input_audio", "audio_url", "source"})


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _max_tokens(value: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if (count := _count(value.get(key))) is not None:
            return count
    return _count(options.get("max_new_tokens"))
