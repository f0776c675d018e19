"""How many tokens a text is, by a tokenizer that is not known: learnt from requests whose count is.

    tokens ~ a * (weights . features of the text) + (1 - a) * (tokens per event) * (events)

Text alone: words, punctuation, digits, Han, kana, ... each cost so many tokens on average. ASCII
costs about the same in every large vocabulary, Han and kana up to twice as much in one as in
another; the prior says so, in its means (read off three vocabularies) and in its covariance: a
scale common to all weights, a wider one common to the scripts that vocabularies differ in, and a
little of each weight's own. Each known request is one observation of a Bayesian linear regression
(Kalman filter), its noise variance proportional to its tokens; outliers are clipped to three
deviations.

Events alone: an engine sends one event a step, so a plain server's events are its tokens, and a
speculating server's are a little steadier than its text where acceptance is steady. `a` weighs the
two by their recent squared errors.
"""

import operator
from dataclasses import dataclass, field
from math import sqrt

_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123))
_DIGITS = bytes(range(48, 58))
_PUNCTUATION = bytes(sorted(set(range(33, 127)) - set(_LETTERS) - set(_DIGITS)))
_BACKSLASH = 0x5C
_KANA_LEAD = b"\xe3"
_HAN_LEADS = bytes(range(0xE4, 0xEA))
_OTHER_LEADS = bytes(sorted((set(range(0xC2, 0xF5)) - set(_HAN_LEADS)) - set(_KANA_LEAD)))


def _marking(kept: bytes) -> bytes:
    return bytes(b"x"[0] if byte in kept else b" "[0] for byte in range(256))


def _deleting_all_but(kept: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in kept)


_MARK_LETTERS = _marking(_LETTERS)
_MARK_PUNCTUATION = _marking(_PUNCTUATION)
_NOT_DIGITS = _deleting_all_but(_DIGITS)
_NOT_HAN = _deleting_all_but(_HAN_LEADS)
_NOT_OTHER = _deleting_all_but(_OTHER_LEADS)

# Per feature of `measure`: the prior weight in tokens, and its own deviation as a share of it.
_PRIOR = (
    (0.78, 0.06),  # ASCII words
    (0.06, 0.06),  # ASCII letters
    (0.95, 0.3),  # digits
    (0.6, 0.1),  # runs of punctuation
    (0.18, 0.1),  # punctuation characters
    (1.06, 0.1),  # line ends
    (0.78, 0.1),  # kana and East Asian punctuation
    (0.88, 0.1),  # Han
    (0.55, 0.4),  # all other characters
)
_SIZE = len(_PRIOR)
_FIRST_FOREIGN = 6
_COMMON_DEVIATION = 0.12
_FOREIGN_DEVIATION = 0.35
_NOISE = 0.3  # variance of a text's tokens about the linear model, per token
_CLIP_DEVIATIONS = 3.0
# A weight may drift by its own deviation in so many tokens; errors are forgotten faster.
_DRIFT_TOKENS = 1_000_000
_ERROR_HALF_LIFE_TOKENS = 4_000
_PRIOR_TOKENS = 100.0  # what the prior belief in both errors weighs
# An update costs about 20 us: small requests are put together, more of them once most is learnt.
_YOUNG_TOKENS = 8_000
_BATCH_TOKENS_YOUNG = 64
_BATCH_TOKENS = 1_000

Features = tuple[float, ...]
NO_TEXT: Features = (0.0,) * _SIZE


def measure(text: bytes | bytearray) -> Features:
    """Return the features of a text: UTF-8 inside of a JSON string, its escapes still in place."""
    if _BACKSLASH in text:
        text = text.replace(b"\\\\", b"`").replace(b"\\n", b"\n").replace(b"\\t", b" ")
        text = text.replace(b"\\", b"")
    words, letters = _runs(text.translate(_MARK_LETTERS))
    marks, punctuation = _runs(text.translate(_MARK_PUNCTUATION))
    digits = len(text.translate(None, _NOT_DIGITS))
    lines = text.count(b"\n")
    if text.isascii():
        return words, letters, digits, marks, punctuation, lines, 0, 0, 0
    kana = text.count(_KANA_LEAD)
    han = len(text.translate(None, _NOT_HAN))
    other = len(text.translate(None, _NOT_OTHER))
    return words, letters, digits, marks, punctuation, lines, kana, han, other


def _runs(marked: bytes | bytearray) -> tuple[int, int]:
    """Return how many runs of marks there are, and how many marks."""
    return marked.count(b" x") + marked.startswith(b"x"), marked.count(b"x")


def add(a: Features, b: Features) -> Features:
    """Return the features of two texts together."""
    return tuple(map(operator.add, a, b))


def _prior_covariance() -> list[list[float]]:
    common = [_COMMON_DEVIATION * mean for mean, _ in _PRIOR]
    foreign = [0.0] * _FIRST_FOREIGN + [
        _FOREIGN_DEVIATION * mean for mean, _ in _PRIOR[_FIRST_FOREIGN:]
    ]
    matrix = [
        [c * d + f * g for d, g in zip(common, foreign, strict=True)]
        for c, f in zip(common, foreign, strict=True)
    ]
    for i, (mean, deviation) in enumerate(_PRIOR):
        matrix[i][i] += (deviation * mean) ** 2
    return matrix


@dataclass(slots=True)
class _Error:
    """A decaying mean of squared errors per token."""

    squared: float = _NOISE * _PRIOR_TOKENS
    tokens: float = _PRIOR_TOKENS

    def add(self, squared: float, tokens: float) -> None:
        decay = 0.5 ** (tokens / _ERROR_HALF_LIFE_TOKENS)
        self.squared = self.squared * decay + squared
        self.tokens = self.tokens * decay + tokens

    @property
    def variance(self) -> float:
        return self.squared / self.tokens


@dataclass(slots=True)
class TokenEstimate:
    """The learner. Its state has a fixed size, whatever it has seen."""

    tokens_seen: int = 0
    _weights: list[float] = field(default_factory=lambda: [mean for mean, _ in _PRIOR])
    _covariance: list[list[float]] = field(default_factory=_prior_covariance)
    _text_error: _Error = field(default_factory=_Error)
    _event_error: _Error = field(default_factory=_Error)
    _event_tokens: float = 0.0
    _events: float = 0.0
    _batch: Features = NO_TEXT
    _batch_tokens: int = 0

    def tokens(self, features: Features, events: int | None) -> float:
        """Estimate. `events` is None where the text did not come in steps."""
        by_text = max(0.0, _dot(self._weights, features))
        if events is None:
            return by_text
        if self._events:
            text, event = self._text_error.variance, self._event_error.variance
            by_event = events * self._event_tokens / self._events
            by_text = (event * by_text + text * by_event) / (event + text)
        # An event that carries text carries at least one token.
        return max(by_text, events)

    def learn(self, features: Features, events: int | None, tokens: int) -> None:
        """Take a finished request, whose true count is `tokens`."""
        if tokens <= 0 or not any(features):
            return
        self.tokens_seen += tokens
        if events:
            self._learn_events(events, tokens)
        self._batch = add(self._batch, features)
        self._batch_tokens += tokens
        young = self.tokens_seen < _YOUNG_TOKENS
        if self._batch_tokens >= (_BATCH_TOKENS_YOUNG if young else _BATCH_TOKENS):
            self._learn_text(self._batch, self._batch_tokens)
            self._batch, self._batch_tokens = NO_TEXT, 0

    def _learn_events(self, events: int, tokens: int) -> None:
        if self._events:
            error = tokens - events * self._event_tokens / self._events
            self._event_error.add(error * error, tokens)
        decay = 0.5 ** (tokens / _ERROR_HALF_LIFE_TOKENS)
        self._event_tokens = self._event_tokens * decay + tokens
        self._events = self._events * decay + events

    def _learn_text(self, features: Features, tokens: int) -> None:
        covariance = self._covariance
        for i, (mean, deviation) in enumerate(_PRIOR):
            covariance[i][i] += (deviation * mean) ** 2 * tokens / _DRIFT_TOKENS
        gain = [_dot(row, features) for row in covariance]
        noise = _NOISE * tokens
        variance = _dot(gain, features) + noise
        error = tokens - _dot(self._weights, features)
        # What this very observation teaches is not held against the estimates that follow.
        self._text_error.add(error * error * noise / variance, tokens)
        limit = _CLIP_DEVIATIONS * sqrt(variance)
        step = max(-limit, min(limit, error)) / variance
        self._weights = [weight + g * step for weight, g in zip(self._weights, gain, strict=True)]
        for row, g in zip(covariance, gain, strict=True):
            share = g / variance
            row[:] = [cell - share * h for cell, h in zip(row, gain, strict=True)]


def _dot(a: list[float], b: Features) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
