"""How many tokens a text is, by a tokenizer that is not known: learnt from requests whose count is.

    tokens ~ a * (weights . features of the text) + (1 - a) * (weights . events and scripts)

Text alone: words, punctuation, digits, kana, Han, rare Han, ... each cost so many tokens on
average. ASCII costs about the same in every large vocabulary, Han and kana up to twice as much in
one as in another; the prior says so, in its means (read off four vocabularies) and in its
covariance: a scale common to all weights, a wider one common to the scripts that vocabularies
differ in, and a little of each weight's own.

Events alone: an engine sends one event a step, so a plain server's events are its tokens (but for
characters of several tokens, which come in one event), and a speculating server's are steady where
acceptance is.

Each is a Bayesian linear regression (Kalman filter), a known request one observation. The noise is
what the filter's own errors say, per token; outliers are clipped to three deviations. `a` weighs
the two by their noise.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from router.core.common_han import COMMON_HAN

_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123))
_DIGITS = bytes(range(48, 58))
_PUNCTUATION = bytes(sorted(set(range(33, 127)) - set(_LETTERS) - set(_DIGITS)))
_BACKSLASH = 0x5C
_KANA_LEAD = b"\xe3"
_HAN_LEADS = bytes(range(0xE4, 0xEA))
_OTHER_LEADS = bytes(sorted((set(range(0xC2, 0xF5)) - set(_HAN_LEADS)) - set(_KANA_LEAD)))
# One run of them is one match, so that a text has few.
_COMMON_HAN = re.compile(f"[{COMMON_HAN}]+")
_KATAKANA = re.compile("[\u30a0-\u30ff]+")


def _marking(kept: bytes) -> bytes:
    return bytes(b"x"[0] if byte in kept else b" "[0] for byte in range(256))


def _deleting_all_but(kept: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in kept)


_MARK_LETTERS = _marking(_LETTERS)
_MARK_PUNCTUATION = _marking(_PUNCTUATION)
_NOT_DIGITS = _deleting_all_but(_DIGITS)
_NOT_HAN = _deleting_all_but(_HAN_LEADS)
_NOT_OTHER = _deleting_all_but(_OTHER_LEADS)

# A prior: per feature the weight in tokens, its own deviation, and how far it moves with the other
# scripts (both in tokens too).
_TEXT_PRIOR = (
    (0.84, 0.04, 0.0),  # ASCII words
    (0.03, 0.005, 0.0),  # ASCII letters
    (1.1, 0.3, 0.0),  # digits
    (1.1, 0.3, 0.0),  # runs of punctuation
    (-0.1, 0.2, 0.0),  # punctuation characters
    (1.15, 0.1, 0.0),  # line ends
    (0.7, 0.08, 0.15),  # kana and East Asian punctuation
    (-0.3, 0.1, 0.0),  # katakana, which are kana too
    (0.67, 0.1, 0.2),  # Han
    (1.35, 0.25, 0.0),  # rare Han, which are Han too
    (0.5, 0.2, 0.0),  # all other characters
)
_EVENT_PRIOR = (
    (1.5, 1.0, 0.0),  # events
    (0.0, 0.1, 0.0),  # kana
    (0.0, 0.1, 0.0),  # Han
    (0.0, 0.2, 0.0),  # rare Han
    (0.0, 0.1, 0.0),  # others
)
_KANA, _HAN, _RARE_HAN, _OTHER = 6, 8, 9, 10
_COMMON_DEVIATION = 0.08  # of all weights together, as a share
_NOISE = 0.3  # variance of a text's tokens about the linear model, per token, before it is known
_NOISE_MIN = 0.01
_CLIP_DEVIATIONS = 3.0
# A weight may drift by its own deviation in so many tokens; errors are forgotten faster.
_TEXT_DRIFT_TOKENS = 1_000_000
_EVENT_DRIFT_TOKENS = 400_000
_ERROR_HALF_LIFE_TOKENS = 4_000
_PRIOR_TOKENS = 100.0  # what the prior belief in both errors weighs
# An update costs about 20 us: small requests are put together, more of them once most is learnt.
_YOUNG_TOKENS = 8_000
_BATCH_TOKENS_YOUNG = 64
_BATCH_TOKENS = 1_000

Features = tuple[float, ...]
NO_TEXT: Features = (0.0,) * len(_TEXT_PRIOR)


def measure(text: bytes | bytearray) -> Features:
    """Return the features of a text: UTF-8 inside of a JSON string, its escapes still in place."""
    if _BACKSLASH in text:
        text = _without_escapes(text)
    words, letters = _runs(text.translate(_MARK_LETTERS))
    marks, punctuation = _runs(text.translate(_MARK_PUNCTUATION))
    digits = len(text.translate(None, _NOT_DIGITS))
    lines = text.count(b"\n")
    if text.isascii():
        return words, letters, digits, marks, punctuation, lines, 0, 0, 0, 0, 0
    kana = text.count(_KANA_LEAD)
    han = len(text.translate(None, _NOT_HAN))
    other = len(text.translate(None, _NOT_OTHER))
    katakana = rare = 0
    if kana or han:
        string = text.decode("utf-8", "ignore")
        katakana = sum(map(len, _KATAKANA.findall(string)))
        rare = max(0, han - sum(map(len, _COMMON_HAN.findall(string))))
    return words, letters, digits, marks, punctuation, lines, kana, katakana, han, rare, other


def unescaped(text: bytes | bytearray) -> str:
    """Return the text that such bytes stand for, a backslash as a mark like others."""
    return (_without_escapes(text) if _BACKSLASH in text else text).decode("utf-8", "ignore")


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    text = text.replace(b"\\\\", b"`").replace(b"\\n", b"\n").replace(b"\\t", b" ")
    return text.replace(b"\\", b"")


def _runs(marked: bytes | bytearray) -> tuple[int, int]:
    """Return how many runs of marks there are, and how many marks."""
    return marked.count(b" x") + marked.startswith(b"x"), marked.count(b"x")


def add(a: Features, b: Features) -> Features:
    """Return the features of two texts together."""
    return tuple(map(operator.add, a, b))


def _with_events(features: Features, events: int) -> Features:
    return events, features[_KANA], features[_HAN], features[_RARE_HAN], features[_OTHER]


@dataclass(slots=True)
class _Regression:
    """Tokens as a weighted sum of features. Its state has a fixed size, whatever it has seen."""

    prior: Sequence[tuple[float, float, float]]
    drift_tokens: int
    _weights: list[float] = field(init=False)
    _covariance: list[list[float]] = field(init=False)
    # A decaying mean of squared errors per token.
    _squared: float = _NOISE * _PRIOR_TOKENS
    _tokens: float = _PRIOR_TOKENS
    _seen_tokens: int = 0
    _batch: Features = ()
    _batch_tokens: int = 0

    def __post_init__(self) -> None:
        self._weights = [mean for mean, _, _ in self.prior]
        self._covariance = [
            [_COMMON_DEVIATION**2 * mean * other + script * far for other, _, far in self.prior]
            for mean, _, script in self.prior
        ]
        for i, (_, deviation, _) in enumerate(self.prior):
            self._covariance[i][i] += deviation**2

    @property
    def noise(self) -> float:
        """The variance of its errors, per token."""
        return max(_NOISE_MIN, self._squared / self._tokens)

    def tokens(self, features: Features) -> float:
        """Estimate."""
        return _dot(self._weights, features)

    def learn(self, features: Features, tokens: int) -> None:
        """Take an observation, small ones together."""
        self._seen_tokens += tokens
        self._batch = add(self._batch, features) if self._batch else features
        self._batch_tokens += tokens
        young = self._seen_tokens < _YOUNG_TOKENS
        if self._batch_tokens >= (_BATCH_TOKENS_YOUNG if young else _BATCH_TOKENS):
            self._update(self._batch, self._batch_tokens)
            self._batch, self._batch_tokens = (), 0

    def _update(self, features: Features, tokens: int) -> None:
        covariance = self._covariance
        for i, (_, deviation, _) in enumerate(self.prior):
            covariance[i][i] += deviation**2 * tokens / self.drift_tokens
        gain = [_dot(row, features) for row in covariance]
        noise = self.noise * tokens
        variance = _dot(gain, features) + noise
        error = tokens - self.tokens(features)
        limit = _CLIP_DEVIATIONS * sqrt(variance)
        clipped = max(-limit, min(limit, error))
        # What this very observation teaches is not held against the estimates that follow.
        decay = 0.5 ** (tokens / _ERROR_HALF_LIFE_TOKENS)
        self._squared = self._squared * decay + clipped * clipped * noise / variance
        self._tokens = self._tokens * decay + tokens
        step = clipped / variance
        self._weights = [weight + g * step for weight, g in zip(self._weights, gain, strict=True)]
        for row, g in zip(covariance, gain, strict=True):
            share = g / variance
            row[:] = [cell - share * h for cell, h in zip(row, gain, strict=True)]


def _text_regression() -> _Regression:
    return _Regression(_TEXT_PRIOR, _TEXT_DRIFT_TOKENS)


def _event_regression() -> _Regression:
    return _Regression(_EVENT_PRIOR, _EVENT_DRIFT_TOKENS)


@dataclass(slots=True)
class TokenEstimate:
    """The learner."""

    tokens_seen: int = 0
    _by_text: _Regression = field(default_factory=_text_regression)
    _by_event: _Regression = field(default_factory=_event_regression)
    _knows_events: bool = False

    @property
    def young(self) -> bool:
        """Whether little is learnt yet."""
        return self.tokens_seen < _YOUNG_TOKENS

    def tokens(self, features: Features, events: int | None) -> float:
        """Estimate. `events` is None where the text did not come in steps."""
        by_text = max(0.0, self._by_text.tokens(features))
        if events is None:
            return by_text
        if self._knows_events:
            by_event = self._by_event.tokens(_with_events(features, events))
            text, event = self._by_text.noise, self._by_event.noise
            by_text = (event * by_text + text * by_event) / (event + text)
        # An event that carries text carries at least one token.
        return max(by_text, events)

    def learn(self, features: Features, events: int | None, tokens: int) -> None:
        """Take a finished request, whose true count is `tokens`."""
        if tokens <= 0 or not any(features):
            return
        self.tokens_seen += tokens
        if events:
            self._by_event.learn(_with_events(features, events), tokens)
            self._knows_events = True
        self._by_text.learn(features, tokens)


def _dot(a: Sequence[float], b: Features) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
