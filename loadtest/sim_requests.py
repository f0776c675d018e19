"""Request bodies of the simulated engine: read into a Call, or refused, as SGLang does it."""

import uuid
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any

import orjson

from loadtest.sim_text import count_tokens, start_of

# SGLang's own defaults where a client sets no limit; chat has none, and its replies end by
# themselves.
COMPLETION_MAX_TOKENS = 16
GENERATE_MAX_TOKENS = 128
SEQUENCES_MAX = 1024
# A chat template adds some tokens to each message.
_MESSAGE_TOKENS = 4


class Api(Enum):
    """The three APIs that generate."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    GENERATE = "/generate"


class RefusedError(Exception):
    """A request that gets an error instead of tokens: its status and body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence asked for. `start` is where its reply begins on the tape."""

    rid: str
    index: int
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    start: int
    ends_itself: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what to generate and in which shape to answer. `asks` is n per prompt."""

    api: Api
    model: str
    asks: tuple[Ask, ...]
    n: int
    as_list: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def flat_error(status: int, message: str, kind: str) -> dict[str, Any]:
    """Return SGLang's error object."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _invalid(message: str) -> RefusedError:
    status = HTTPStatus.BAD_REQUEST
    return RefusedError(status, flat_error(status, message, status.phrase))


def _bad_request(api: Api, message: str) -> RefusedError:
    if api is Api.GENERATE:
        return RefusedError(400, {"error": {"message": message}})
    return RefusedError(400, flat_error(400, message, "BadRequestError"))


def _get(body: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _invalid(f"1 validation error: body.{name} should be a valid {kind.__name__}")
    return value


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _invalid(
            f"[{{'type': 'json_invalid', 'msg': 'JSON decode error', 'ctx': '{error}'}}]"
        ) from None
    if not isinstance(body, dict):
        raise _invalid("1 validation error: body should be a valid dictionary")
    return body


def parse_call(api: Api, raw: bytes, content_type: str, context_tokens: int) -> Call:
    """Read a request of one of the generating APIs."""
    if (
        api is not Api.GENERATE
        and content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json"
    ):
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed")
    body = parse_body(raw)
    sampling = _get(body, "sampling_params", dict, {}) if api is Api.GENERATE else body
    max_tokens = _max_tokens(api, sampling)
    n = _get(sampling, "n", int, 1)
    prompts, is_batch = _prompts(api, body)
    if n < 1 or len(prompts) * n > SEQUENCES_MAX:
        raise _invalid(
            f"1 validation error: body.n should lie between 1 and {SEQUENCES_MAX} sequences"
        )
    options = _get(body, "stream_options", dict, {})
    rids = _rids(_get(body, "rid", object), len(prompts) if is_batch else None, n)
    asks: list[Ask] = []
    for at, (prompt, prompt_tokens) in enumerate(prompts):
        _check_length(api, prompt_tokens, max_tokens, context_tokens)
        for choice in range(n):
            start = start_of(prompt, choice)
            # A reply without a limit ends itself, at a length that its prompt decides.
            own_end = min(32 + start % 480, context_tokens - prompt_tokens)
            asks.append(
                Ask(
                    rid=rids[at * n + choice],
                    index=at * n + choice,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=prompt_tokens - 1 if choice else 0,
                    max_tokens=own_end if max_tokens is None else max_tokens,
                    start=start,
                    ends_itself=max_tokens is None,
                )
            )
    return Call(
        api=api,
        model=_get(body, "model", str, "default"),
        asks=tuple(asks),
        n=n,
        as_list=is_batch or n > 1,
        stream=_get(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )


def _max_tokens(api: Api, sampling: dict[str, Any]) -> int | None:
    if api is Api.GENERATE:
        limit: int | None = _get(sampling, "max_new_tokens", int, GENERATE_MAX_TOKENS)
    elif api is Api.COMPLETION:
        limit = _get(sampling, "max_tokens", int, COMPLETION_MAX_TOKENS)
    else:
        limit = _get(sampling, "max_completion_tokens", int) or _get(sampling, "max_tokens", int)
    if limit is not None and limit < (0 if api is Api.GENERATE else 1):
        raise _invalid("1 validation error: max_tokens must be positive")
    return limit


def _prompts(api: Api, body: dict[str, Any]) -> tuple[list[tuple[bytes, int]], bool]:
    """Return each prompt's bytes and token count, and whether the request is a batch."""
    if api is Api.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise _invalid("1 validation error: body.messages: Field required")
        if not messages:
            raise _bad_request(api, "Messages cannot be empty.")
        text = "\n".join(_content(message) for message in messages)
        return [(text.encode(), count_tokens(text) + _MESSAGE_TOKENS * len(messages))], False
    if api is Api.COMPLETION:
        prompt = body.get("prompt")
        if prompt is None:
            raise _invalid("1 validation error: body.prompt: Field required")
    else:
        prompt = body.get("text")
        prompt = body.get("input_ids") if prompt is None else prompt
        if prompt is None:
            raise _bad_request(api, "Either text, input_ids or input_embeds should be provided.")
    if not prompt:
        raise _bad_request(api, "Prompt cannot be empty")
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return [_prompt(part) for part in (prompt if is_batch else [prompt])], is_batch


def _prompt(prompt: object) -> tuple[bytes, int]:
    if isinstance(prompt, str):
        return prompt.encode(), count_tokens(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return orjson.dumps(prompt), len(prompt)
    raise _invalid("1 validation error: a prompt should be a string or a list of token ids")


def _content(message: object) -> str:
    if not isinstance(message, dict):
        raise _invalid("1 validation error: body.messages: a message should be a valid dictionary")
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _rids(rid: object, batch: int | None, n: int) -> list[str]:
    """Return an id for every sequence: the client's own, but new ones for n > 1."""
    prompts = 1 if batch is None else batch
    if n > 1 or rid is None:
        return [uuid.uuid4().hex for _ in range(prompts * n)]
    if isinstance(rid, str):
        return [rid] if batch is None else [f"{rid}_{at}" for at in range(prompts)]
    if isinstance(rid, list) and len(rid) == prompts and all(isinstance(each, str) for each in rid):
        return list(rid)
    raise _invalid("The rid should be a string or a list of strings.")


def _check_length(
    api: Api, prompt_tokens: int, max_tokens: int | None, context_tokens: int
) -> None:
    if prompt_tokens >= context_tokens:
        raise _bad_request(
            api,
            f"The input ({prompt_tokens} tokens) is longer than the model's context length "
            f"({context_tokens} tokens).",
        )
    if max_tokens is not None and prompt_tokens + max_tokens > context_tokens:
        raise _bad_request(
            api,
            "Requested token count exceeds the model's maximum context length of "
            f"{context_tokens} tokens. You requested a total of {prompt_tokens + max_tokens} "
            f"tokens: {prompt_tokens} tokens from the input messages and {max_tokens} tokens for "
            "the completion.",
        )
