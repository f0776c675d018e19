"""What requests ask for: lengths drawn from a seed, prompts and bodies made to them.

Request number k asks for the same in every run of one seed, whatever came before it, so that runs
of different policies take the same requests in the same order.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Protocol

# Short common words: most tokenizers count each, with its space, as one token.
_WORDS = """
    the a of to in is it on as by we you they can will new old first last good long high low
    day time way year work part place case point group world life hand water line name home
    list state city story river road field light music paper table house green small large
    open clear early late
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's lengths, in tokens; `output_tokens` is allowed and, where possible, forced."""

    index: int
    prompt_tokens: int
    output_tokens: int


class Lengths(Protocol):
    """A source of lengths."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return prompt and output tokens of one request."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request asks for the same."""

    prompt_tokens: int
    output_tokens: int

    def draw(self, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002 - the protocol's signature
        """Return the two fixed lengths."""
        return self.prompt_tokens, self.output_tokens


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal length with a median and a spread (sigma of its logarithm), cut off at `high`."""

    median: float
    sigma: float
    high: int

    def draw(self, rng: random.Random) -> int:
        """Return one length of at least 4 tokens."""
        return min(max(round(self.median * rng.lognormvariate(0.0, self.sigma)), 4), self.high)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic and its share of the requests."""

    share: float
    prompt: Lognormal
    output: Lognormal


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of traffic drawn by their shares."""

    kinds: tuple[Kind, ...]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Choose a kind, then both of its lengths."""
        kind = rng.choices(self.kinds, [kind.share for kind in self.kinds])[0]
        return kind.prompt.draw(rng), kind.output.draw(rng)


# Chat, long answers, and long prompts with short answers. Medians and tails are of the size that
# published traces of conversation traffic show; prompts are short enough for a run of seconds.
CHAT_MIX = Mix(
    (
        Kind(0.70, Lognormal(220, 0.8, 2000), Lognormal(120, 0.7, 500)),
        Kind(0.15, Lognormal(120, 0.6, 1000), Lognormal(320, 0.4, 700)),
        Kind(0.15, Lognormal(900, 0.5, 3000), Lognormal(50, 0.5, 200)),
    )
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The numbered requests of a run, all following from `seed`."""

    model: str
    lengths: Lengths
    seed: int
    ignore_eos: bool = True
    extra: dict[str, object] = field(default_factory=dict)

    def ask(self, index: int) -> Ask:
        """Return what request number `index` asks for."""
        return Ask(index, *self.lengths.draw(self._rng(index, "lengths")))

    def body(self, ask: Ask) -> bytes:
        """Return the streaming chat request as JSON; its last event carries the usage."""
        words = self._rng(ask.index, "words").choices(_WORDS, k=ask.prompt_tokens)
        request: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            request["ignore_eos"] = True
        return json.dumps(request | self.extra).encode()

    def _rng(self, index: int, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/{index}/{purpose}")  # noqa: S311 - load, not secrets
