"""Replies of the simulated engine: what it has generated, in SGLang's bytes.

A reply is told after each step that tokens have come and writes one event for the tokens not yet
sent: those of one step, or of several if the client reads more slowly than the engine writes. Head
and first event of a stream are written apart, and the head of the OpenAI APIs only when there is a
first token, as SGLang does it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from loadtest.engine_batch import Sequence, State
from loadtest.sim_requests import Api, Ask, Call, RefusedError, flat_error
from loadtest.sim_text import tape

EOS_TOKEN_ID = 128_009
QUEUE_FULL = "The request queue is full."


class Channel(Protocol):
    """Where a reply goes: one exchange on a connection."""

    @property
    def writable(self) -> bool:
        """Whether the client keeps up, so that more may be written."""
        ...

    def open_stream(self) -> None:
        """Write the head of an event stream."""
        ...

    def event(self, data: bytes) -> None:
        """Write one event, its `data: ` and blank line included."""
        ...

    def close_stream(self) -> None:
        """End the event stream and the exchange."""
        ...

    def json(self, status: int, body: bytes) -> None:
        """Write a whole response and end the exchange."""
        ...

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in a later turn of the event loop."""
        ...


class Output:
    """One sequence of a call: what was asked, where the engine stands, how much is sent."""

    __slots__ = ("arrived_at", "ask", "last_at", "reply", "sent_tokens", "sequence", "told")

    def __init__(self, ask: Ask, reply: "Reply", now: float) -> None:
        self.ask = ask
        self.reply = reply
        self.sequence = Sequence(ask.prompt_tokens, ask.max_tokens, self, ask.cached_tokens)
        self.sent_tokens = 0
        self.told = False
        self.arrived_at = now
        self.last_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether no token will come any more."""
        return self.sequence.state in (State.FINISHED, State.ABORTED)

    @property
    def finish_reason(self) -> dict[str, Any]:
        """Why it ended, in SGLang's words."""
        if self.sequence.state is State.ABORTED:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if self.ask.ends_itself:
            return {"type": "stop", "matched": EOS_TOKEN_ID}
        return {"type": "length", "length": self.ask.max_tokens}


class Reply(ABC):
    """What all shapes share: its outputs, and when the exchange is over."""

    def __init__(self, call: Call, channel: Channel, now: float) -> None:
        self.call = call
        self.channel = channel
        self.created = int(time.time())
        self.outputs = [Output(ask, self, now) for ask in call.asks]

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return all(output.done for output in self.outputs)

    @abstractmethod
    def progress(self, output: Output) -> None:
        """Take note that a step has advanced or ended this output."""

    def resume(self) -> None:  # noqa: B027  (a whole reply has nothing to do here)
        """Take note that the client reads again. Only a stream can have held something back."""

    def reject(self) -> None:
        """Answer that the queue is full."""
        body = flat_error(503, QUEUE_FULL, "503")
        self.channel.json(503, orjson.dumps(body))

    def usage(self) -> dict[str, Any]:
        """Count the call: each prompt once, every choice's tokens."""
        prompts = sum(
            out.ask.prompt_tokens for out in self.outputs if out.ask.index % self.call.n == 0
        )
        return usage_of(prompts, sum(out.sequence.output_tokens for out in self.outputs))


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage object of these counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def text_of(output: Output) -> orjson.Fragment:
    """Return all the text of an output so far, as a JSON string."""
    return orjson.Fragment(
        b'"' + tape().text(output.ask.start, output.sequence.output_tokens) + b'"'
    )


def meta_info(output: Output, now: float) -> dict[str, Any]:
    """Return what /generate says about an output beside its text."""
    sequence = output.sequence
    meta: dict[str, Any] = {
        "id": output.ask.rid,
        "finish_reason": output.finish_reason if output.done else None,
        "prompt_tokens": output.ask.prompt_tokens,
        "weight_version": "default",
        "num_retractions": sequence.retractions,
        "queue_time": 0.0,
        "reasoning_tokens": 0,
        "completion_tokens": sequence.output_tokens,
        "cached_tokens": output.ask.cached_tokens,
        "cached_tokens_details": {"device": output.ask.cached_tokens, "host": 0},
        "dp_rank": None,
    }
    if output.done:
        meta["e2e_latency"] = now - output.arrived_at
        if sequence.chances and sequence.decode_steps:
            meta["spec_accept_length"] = sequence.output_tokens / sequence.decode_steps
            meta["spec_verify_ct"] = sequence.decode_steps
    return meta


class WholeReply(Reply):
    """Not streamed: one JSON body when all sequences have ended."""

    def progress(self, output: Output) -> None:
        """Write the body once the last output is done."""
        if output.done and self.done:
            self.channel.json(200, orjson.dumps(self._body()))

    def _body(self) -> object:
        call = self.call
        if call.api is Api.GENERATE:
            now = self.outputs[0].last_at or self.outputs[0].arrived_at
            items = [
                {
                    "text": text_of(output),
                    "output_ids": orjson.Fragment(
                        tape().ids(output.ask.start, output.sequence.output_tokens)
                    ),
                    "meta_info": meta_info(output, now),
                }
                for output in self.outputs
            ]
            return items if call.as_list else items[0]
        chat = call.api is Api.CHAT
        return {
            "id": self.outputs[0].ask.rid,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": call.model,
            "choices": [self._choice(output, chat) for output in self.outputs],
            "usage": self.usage(),
            "metadata": {"weight_version": "default"},
        }

    def _choice(self, output: Output, chat: bool) -> dict[str, Any]:
        text = text_of(output) if output.sequence.output_tokens else None
        choice: dict[str, Any] = {"index": output.ask.index}
        if chat:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "reasoning_content": None,
                "tool_calls": None,
            }
        else:
            choice["text"] = text or ""
        reason = output.finish_reason
        choice.update(
            logprobs=None, finish_reason=reason["type"], matched_stop=reason.get("matched")
        )
        return choice


def refuse(error: RefusedError, channel: Channel) -> None:
    """Answer a request that was refused before it reached the engine."""
    channel.json(error.status, orjson.dumps(error.body))
