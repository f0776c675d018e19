"""Event streams of the simulated engine: SGLang's three dialects, byte for byte.

An event is three slices put together: what this output's chunks begin with, the text, and the end.
No JSON is built per event, except for `/generate`, whose events repeat all that came before.
"""

from abc import abstractmethod
from typing import Any

import orjson

from loadtest.sim_replies import (
    QUEUE_FULL,
    Channel,
    Output,
    Reply,
    WholeReply,
    meta_info,
    text_of,
    usage_of,
)
from loadtest.sim_requests import Api, Ask, Call, flat_error
from loadtest.sim_text import tape


class StreamReply(Reply):
    """An event stream. The subclasses are its three dialects."""

    def __init__(self, call: Call, channel: Channel, now: float) -> None:
        super().__init__(call, channel, now)
        self._opened = False
        self._flowing = False
        self._closed = False

    def progress(self, output: Output) -> None:
        """Write the event of this output's new tokens, or open the stream first."""
        if self._flowing and self.channel.writable:
            self._write(output)
            if output.done:
                self._close_if_done()
        elif not self._opened:
            self.open()

    def open(self) -> None:
        """Write the head now, the first events in a later turn of the loop."""
        self._opened = True
        self.channel.open_stream()
        self.channel.soon(self._start)

    def resume(self) -> None:
        """Write what could not be written while the client did not read."""
        if self._flowing and not self._closed:
            for output in self.outputs:
                self._write(output)
            self._close_if_done()

    def reject(self) -> None:
        """Answer that the queue is full, inside a 200 stream."""
        if not self._opened:
            self.channel.open_stream()
        self._closed = True
        body = {"error": flat_error(503, QUEUE_FULL, "SERVICE_UNAVAILABLE")}
        self.channel.soon(lambda: self._end(b"data: " + orjson.dumps(body) + b"\n\n"))

    def _start(self) -> None:
        self._flowing = True
        self.resume()

    def _close_if_done(self) -> None:
        if not self._closed and self.done:
            self._closed = True
            self._end(self._closing())

    def _end(self, last: bytes) -> None:
        if last:
            self.channel.event(last)
        self.channel.event(b"data: [DONE]\n\n")
        self.channel.close_stream()

    @abstractmethod
    def _write(self, output: Output) -> None:
        """Send what is new of this output."""

    def _closing(self) -> bytes:
        """Return what comes between the last token and [DONE]."""
        return b""


class OpenAIStream(StreamReply):
    """Chat and completion chunks. What a chunk begins and ends with is prepared once."""

    def __init__(self, call: Call, channel: Channel, now: float) -> None:
        super().__init__(call, channel, now)
        self._chat = call.api is Api.CHAT
        self._object = b"chat.completion.chunk" if self._chat else b"text_completion"
        self._heads = [self._head(output.ask) for output in self.outputs]
        self._common_tail = None if call.continuous_usage else self._tail(None, 0, 0)

    def _envelope(self, rid: str) -> bytes:
        return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,' % (
            orjson.dumps(rid),
            self._object,
            self.created,
            orjson.dumps(self.call.model),
        )

    def _head(self, ask: Ask) -> bytes:
        opening = b'"choices":[{"index":%d,' % ask.index
        content = b'"delta":{"reasoning_content":null,"content":"' if self._chat else b'"text":"'
        return self._envelope(ask.rid) + opening + content

    def _write(self, output: Output) -> None:
        sequence = output.sequence
        sent, total = output.sent_tokens, sequence.output_tokens
        first = not output.told
        if self._chat and first and (total or output.done):
            output.told = True
            self.channel.event(self._role(output.ask))
        if total > sent:
            output.sent_tokens = total
            text = tape().text(output.ask.start + sent, total - sent)
        elif output.done and not self._chat and not output.told:
            text = b""
        else:
            return
        tail = self._common_tail
        if tail is None or (output.done and not self._chat):
            # A completion's last chunk says why it ended; chat has a chunk of its own for that.
            reason = output.finish_reason if output.done and not self._chat else None
            tail = self._tail(reason, output.ask.prompt_tokens, total)
        output.told = self._chat or output.done
        self.channel.event(self._heads[output.ask.index] + text + tail)

    def _tail(
        self, reason: dict[str, Any] | None, prompt_tokens: int, completion_tokens: int
    ) -> bytes:
        end = b'"},' if self._chat else b'",'
        if reason is None:
            end += b'"logprobs":null,"finish_reason":null,"matched_stop":null}]'
        else:
            end += b'"logprobs":null,"finish_reason":%b,"matched_stop":%b}]' % (
                orjson.dumps(reason["type"]),
                orjson.dumps(reason.get("matched")),
            )
        if self.call.continuous_usage:
            usage = usage_of(prompt_tokens, completion_tokens)
            end += b',"usage":' + orjson.dumps(usage)
        elif not self._chat:
            end += b',"usage":null'
        return end + b"}\n\n"

    def _role(self, ask: Ask) -> bytes:
        return self._envelope(ask.rid) + (
            b'"choices":[{"index":%d,"delta":{"reasoning_content":null,"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n' % ask.index
        )

    def _closing(self) -> bytes:
        parts = []
        if self._chat:
            for output in self.outputs:
                reason = output.finish_reason
                parts.append(
                    self._envelope(output.ask.rid)
                    + b'"choices":[{"index":%d,"delta":{"reasoning_content":null},"logprobs":null,'
                    b'"finish_reason":%b,"matched_stop":%b}]}\n\n'
                    % (
                        output.ask.index,
                        orjson.dumps(reason["type"]),
                        orjson.dumps(reason.get("matched")),
                    )
                )
        if self.call.include_usage:
            usage = self.usage()
            if not self._chat:
                del usage["prompt_tokens_details"]
            parts.append(
                self._envelope(self.outputs[-1].ask.rid)
                + b'"choices":[],"usage":%b}\n\n' % orjson.dumps(usage)
            )
        return b"".join(parts)


class GenerateStream(StreamReply):
    """SGLang's own stream: each event holds all so far, and the head waits for no token."""

    def _write(self, output: Output) -> None:
        total = output.sequence.output_tokens
        if output.told or (total == output.sent_tokens and not output.done):
            return
        output.sent_tokens = total
        output.told = output.done
        item: dict[str, Any] = {
            "text": text_of(output),
            "output_ids": orjson.Fragment(tape().ids(output.ask.start, total)),
            "meta_info": meta_info(output, output.last_at or output.arrived_at),
        }
        if self.call.as_list:
            item["index"] = output.ask.index
        self.channel.event(b"data: " + orjson.dumps(item) + b"\n\n")

    def reject(self) -> None:
        """Answer that the queue is full, as the finish reason of an output without text."""
        self._closed = True
        item = {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": self.outputs[0].ask.rid,
                "finish_reason": {"type": "abort", "status_code": 503, "message": QUEUE_FULL},
                "weight_version": "default",
                "completion_tokens": 0,
            },
        }
        self.channel.soon(lambda: self._end(b"data: " + orjson.dumps(item) + b"\n\n"))


def make_reply(call: Call, channel: Channel, now: float) -> Reply:
    """Return the reply that fits the call; `now` is model time."""
    if not call.stream:
        return WholeReply(call, channel, now)
    if call.api is Api.GENERATE:
        stream = GenerateStream(call, channel, now)
        stream.open()
        return stream
    return OpenAIStream(call, channel, now)
