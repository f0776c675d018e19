"""Counting output tokens in the bytes that pass by.

A chunk is not a token, nor is an event: an engine sends what one step gave, which under speculation
is one to four tokens, and a reader that lags gets several steps at once.

Where the engine counts, its count is read: SGLang writes `"completion_tokens":N` into the usage
that ends a stream, into every event if the client asked for that, and into every event of
`/generate`. N is the running count of one sequence, so the latest is the one that holds. Elsewhere
the text is taken out of its envelope. Where the vocabulary is known its tokens are looked up
(vocabulary.py); where not they are estimated (token_estimate.py), and each request that ends with a
count teaches the estimate.

No JSON is parsed. Inside a JSON string every quote has a backslash before it, so `"content":"` and
`"completion_tokens":` cannot be the model's words, and a raw line feed always ends an event. Bytes
may be cut anywhere; what is kept from one chunk to the next is less than 50 bytes.

The common chunk is one event that differs from the one before in its text only. Its envelope is
remembered (where the text starts, and all that follows it), so that such a chunk costs two
comparisons and a slice. Chunks are kept, a few and not large, and read together: code and data that
are at hand already cost half.
"""

import re
from collections import OrderedDict

from router.core.token_estimate import NO_TEXT, Features, TokenEstimate, add, measure, unescaped
from router.core.vocabulary import Vocabulary

# 1: a string of output text begins. 2: a count. 3: whose count it is. The look-ahead is for speed.
_MARK = re.compile(
    rb'"(?=[acdort])(?:'
    rb'((?:content|text|reasoning_content|arguments|delta)": ?")'
    rb'|(?:completion|output)_tokens": ?(\d{1,12})\D)'
)
_COUNT_KEYS = (b'"completion_tokens":', b'"output_tokens":')
_MARK_OR_INDEX = re.compile(_MARK.pattern + rb'|"index": ?(\d{1,6})\D')
_TEXT, _COUNT, _INDEX = 1, 2, 3
# Up to the closing quote, or to where the bytes end; never between a backslash and what it escapes.
_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_NUMBER = re.compile(rb" ?(\d{1,12})\D")
_QUOTE = 0x22
_LINE_FEED = 0x0A
# No mark is longer, so one that was cut lies within so many last bytes.
_MARK_BYTES_MAX = 48
_SUFFIX_BYTES_MAX = 512
_TEXT_BYTES_MAX = 1024
# Once most is learnt, so few of the bodies that come whole are read for more than their count.
_LESSON_EVERY = 8
_UNREAD_MAX = 32
# Streams that are read for a total: some 10 us each.
_READ_MAX = 64
_UNREAD_BYTES_MAX = 2048  # of one chunk; what is larger is read at once


class TokenModel:
    """What is known of one server's tokens. Its streams share it."""

    def __init__(self) -> None:
        self.estimate = TokenEstimate()
        self.vocabulary: Vocabulary | None = None
        # What each stream under way had counted when it was last read, the longest ago first.
        self._live: OrderedDict[TokenCounter, float] = OrderedDict()
        self._total = self._told = 0.0
        self._turn = 0

    def use(self, vocabulary: Vocabulary | None) -> None:
        """Count streams that begin from now on by this vocabulary; None: it is not known."""
        self.vocabulary = vocabulary

    def counter(self, sequences: int = 1) -> "TokenCounter":
        """Return the counter of one response, which carries so many sequences (n times prompts).

        It counts into the total until it is finished, so that it must be, whatever happens.
        """
        self._turn += 1
        lesson = self.vocabulary is None and (
            self._turn % _LESSON_EVERY == 0 or self.estimate.young
        )
        counter = TokenCounter(self, sequences, lesson=lesson)
        self._live[counter] = 0.0
        return counter

    def total_tokens(self) -> float:
        """Return the output tokens so far, those of streams under way included.

        Meant for every quarter of a second. So many streams are read, those that were not for
        longest; of the others it has what they had then. Never less than before: where the
        count that ends a stream is less than its estimate, the total waits.
        """
        for _ in range(min(_READ_MAX, len(self._live))):
            counter, before = self._live.popitem(last=False)
            self._live[counter] = now = counter.tokens
            self._total += now - before
        self._told = max(self._told, self._total)
        return self._told

    def ended(self, counter: "TokenCounter") -> None:
        """Take over what a finished counter has counted."""
        self._total += counter.tokens - self._live.pop(counter)


class TokenCounter:
    """Counts the output tokens of one response, streamed or not, over all of its sequences."""

    __slots__ = (
        "_by_index", "_carry", "_count", "_count_key", "_counts", "_events", "_features",
        "_finished", "_inside", "_key", "_key_at", "_lesson", "_line_count", "_line_index",
        "_looked_up", "_model", "_ready", "_search", "_sequences", "_streamed", "_string_bytes",
        "_suffix", "_text", "_text_at", "_total", "_unread", "_vocabulary",
    )  # fmt: skip

    def __init__(self, model: TokenModel, sequences: int, *, lesson: bool) -> None:
        self._lesson = lesson
        self._model = model
        self._sequences = sequences
        self._search = (_MARK if sequences == 1 else _MARK_OR_INDEX).search
        self._finished = False
        self._total: float | None = None
        self._unread: list[bytes] = []
        # Where the scan stands: inside a string of text or not, and bytes that may be half a mark.
        self._streamed: bool | None = None
        self._inside = False
        self._carry = b""
        self._string_bytes = 0
        # The engine's count, and how often it was told; with several sequences, by sequence.
        self._count: int | None = None
        self._counts = 0
        self._count_key: bytes | None = None
        self._line_count = 0
        self._line_index: int | None = None
        self._by_index: dict[int, int] = {}
        # The text so far: its tokens by the vocabulary, or its features if there is none; then the
        # bytes that are not measured yet.
        self._vocabulary = model.vocabulary
        self._events = 0
        self._looked_up = 0
        self._features: Features = NO_TEXT
        self._text = bytearray()
        # The envelope of a one-event chunk. Ready: it is known, and the scan is between events.
        self._ready = False
        self._key = self._suffix = b""
        self._key_at = self._text_at = 0

    @property
    def exact(self) -> bool:
        """Whether `tokens` is the engine's own count."""
        self._read()
        return self._count is not None

    @property
    def tokens(self) -> float:
        """Output tokens so far. Reading it measures up to 1 KiB of text: not for every chunk."""
        if self._total is not None:
            return self._total
        self._read()
        if self._count is not None:
            return self._count
        events = self._events if self._streamed else None
        if self._vocabulary is not None:
            if not self._inside:  # where an event ends, so does a token
                self._measure()
            looked_up = self._looked_up + self._vocabulary.count(unescaped(self._text))
            # An event that carries text carries at least one token.
            return max(looked_up, events or 0)
        # The text stays: measured in smaller parts it would seem to have more words.
        features = add(self._features, measure(self._text))
        return self._model.estimate.tokens(features, events)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the response body, cut anywhere."""
        unread = self._unread
        unread.append(chunk)
        if len(unread) == _UNREAD_MAX or len(chunk) > _UNREAD_BYTES_MAX:
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if not self._read_alike(unread):
            for chunk in unread:
                if self._count_key is not None:
                    self._recount(chunk)
                elif not self._read_alike([chunk]):
                    self._read_other(chunk)
        if len(self._text) > _TEXT_BYTES_MAX:
            self._measure()

    def _read_alike(self, chunks: list[bytes]) -> bool:
        """Take chunks that differ from the one before in their text only; False: not all do so."""
        if not self._ready or self._count_key is not None:
            return False
        key, key_at, suffix = self._key, self._key_at, self._suffix
        start, end = self._text_at, -len(suffix)
        texts = [
            chunk[start:end]
            for chunk in chunks
            if chunk.endswith(suffix) and chunk.startswith(key, key_at)
        ]
        if len(texts) < len(chunks) or not all(texts):
            return False
        text = b"".join(texts)
        if _LINE_FEED in text:
            return False
        self._events += len(texts)
        self._text += text
        return True

    def _read_other(self, chunk: bytes) -> None:
        if self._sequences == 1:
            self._scan(chunk)
            return
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._scan(line + b"\n")
            self._end_line()
        self._scan(rest)

    def finish(self, usage_completion_tokens: int | None = None) -> None:
        """Take the end of the response, with its true count if the caller knows that."""
        if self._finished:
            return
        self._finished = True
        if not self._lesson:
            self._take_count()
        self._read()
        self._end_line()
        if usage_completion_tokens is not None:
            self._count = usage_completion_tokens
        # Told more than once: text was skipped, or repeated by each event, after the first count.
        if self._vocabulary is None and self._count is not None and self._counts <= 1:
            self._measure()
            events = self._events if self._streamed else None
            self._model.estimate.learn(self._features, events, self._count)
        self._total = self.tokens
        self._model.ended(self)

    def _take_count(self) -> None:
        """Take the count of a whole body at one search, if it is all there and has one."""
        if self._streamed is not None or self._sequences > 1:
            return
        body = b"".join(self._unread)
        if body.startswith(b"{"):
            for key in _COUNT_KEYS:
                number = _NUMBER.match(body, body.rfind(key) + len(key)) if key in body else None
                if number is not None and int(number[1]):
                    self._count = int(number[1])
                    self._unread.clear()
                    return

    def _scan(self, chunk: bytes) -> None:
        """Go from mark to mark, and remember the envelope if the chunk was one whole event."""
        if self._streamed is None and (head := chunk.lstrip()[:1]):
            self._streamed = head not in b"{["
        data = self._carry + chunk
        texts = key_at = text_at = text_end = at = 0
        if self._inside:
            texts = 2  # not a whole event
            at = self._read_string(data, 0)
        while not self._inside:
            mark = self._search(data, at)
            if mark is None:
                clean = data.endswith(b"\n")
                self._carry = b"" if clean else data[max(at, len(data) - _MARK_BYTES_MAX) :]
                break
            at = mark.end()
            if mark.lastindex == _TEXT:
                texts += 1
                key_at, text_at = mark.start(), at
                at = self._read_string(data, at)
                text_end = at - 1
                continue
            if mark.lastindex == _COUNT:
                self._read_count(mark)
            elif self._line_index is None:
                # The first index is the sequence's; later ones number tool calls.
                self._line_index = int(mark[_INDEX])
        # Bytes that end with a text's last quote are no whole event: alike ones may end with an
        # escaped quote.
        whole = data.endswith(b"\n")
        self._ready = whole and not (self._inside or self._carry or self._sequences > 1)
        if not self._ready:
            return
        if texts == 1 and text_end > text_at and len(data) - text_end <= _SUFFIX_BYTES_MAX:
            self._key, self._suffix = data[key_at:text_at], data[text_end:]
            self._key_at, self._text_at = key_at, text_at
        self._ready = bool(self._suffix)

    def _read_string(self, data: bytes, at: int) -> int:
        """Take the text up to its closing quote, or all there is; return where it ends."""
        match = _STRING.match(data, at)
        end = match.end() if match else at
        self._text += data[at:end]
        self._string_bytes += end - at
        if len(self._text) > _TEXT_BYTES_MAX:
            self._measure()
        self._inside = end == len(data) or data[end] != _QUOTE
        if self._inside:
            self._carry = data[end:]
            return len(data)
        if self._string_bytes:
            self._events += 1
            self._string_bytes = 0
        return end + 1

    def _read_count(self, mark: re.Match[bytes]) -> None:
        count = int(mark[_COUNT])
        if self._sequences > 1:
            self._line_count += count
        elif count:  # 0 is a placeholder, as in the first event of /v1/messages
            self._count = count
            self._counts += 1
            self._count_key = mark[0][: mark[0].index(b":") + 1]

    def _end_line(self) -> None:
        """Enter a line's count: a sequence's own, or without an index that of all of them."""
        if self._line_count:
            self._counts += 1
            if self._line_index is None:
                self._count = self._line_count
            elif self._line_index < self._sequences:
                self._by_index[self._line_index] = self._line_count
                self._count = sum(self._by_index.values())
        self._line_count = 0
        self._line_index = None

    def _recount(self, chunk: bytes) -> None:
        """Find the latest count, and nothing else: one search from the end."""
        key = self._count_key
        assert key is not None
        data = self._carry + chunk
        seen = 0
        at = data.rfind(key)
        while at >= 0:
            number = _NUMBER.match(data, at + len(key))
            if number:
                self._count = int(number[1])
                self._counts += 1
                seen = number.end(1)
                break
            at = data.rfind(key, 0, at)
        clean = data.endswith(b"\n")
        self._carry = b"" if clean else data[max(seen, len(data) - _MARK_BYTES_MAX) :]

    def _measure(self) -> None:
        if self._vocabulary is not None:
            self._looked_up += self._vocabulary.count(unescaped(self._text))
        elif self._text:
            self._features = add(self._features, measure(self._text))
        self._text.clear()
