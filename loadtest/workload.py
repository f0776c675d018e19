"""What requests ask for: lengths drawn from a seed, prompts and bodies made to them.

Request number k asks for the same in every run of one seed, whatever came before it, so that runs
of different policies take the same requests in the same order.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
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
    turn: int = 0


class Lengths(Protocol):
    """A source of lengths."""

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:
        """Return prompt and output tokens of request number `index`."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request asks for the same."""

    prompt_tokens: int
    output_tokens: int

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002
        """Return the two fixed lengths."""
        return self.prompt_tokens, self.output_tokens


class Length(Protocol):
    """A distribution of one length."""

    def draw(self, rng: random.Random) -> int:
        """Return one length, in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any whole length from `low` to `high`; the same one if they are equal."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        return rng.randint(self.low, self.high)


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
class Drawn:
    """Prompt and output lengths drawn each by itself."""

    prompt: Length
    output: Length

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002
        """Draw both lengths."""
        return self.prompt.draw(rng), self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The lengths of a trace, in its order, over and over."""

    pairs: tuple[tuple[int, int], ...] = field(repr=False)

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002
        """Return the lengths of line `index`."""
        return self.pairs[index % len(self.pairs)]


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

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002
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


class Api(StrEnum):
    """The APIs that generate, by their paths."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A real conversation: what the user says in each turn, and the answers' lengths where known.

    `output_tokens` has an entry for each turn, None where the file says nothing of it.
    """

    turns: tuple[str, ...]
    output_tokens: tuple[int | None, ...]
    system: str | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Text that many requests begin with: one of `count` prefixes of `tokens` each, in turn."""

    tokens: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The numbered conversations of a run, all following from `seed`; most have one turn.

    Prompts are made to their lengths, or taken from `conversations`, over and over. A prompt is its
    prefix, if any, and then as many tokens as its length says.
    """

    model: str
    lengths: Lengths
    seed: int
    ignore_eos: bool = True
    extra: dict[str, object] = field(default_factory=dict)
    api: Api = Api.CHAT
    turns: int = 1
    prefix: SharedPrefix | None = None
    conversations: tuple[Conversation, ...] = field(default=(), repr=False)

    def turns_of(self, index: int) -> int:
        """Return how many turns conversation number `index` has."""
        if not self.conversations:
            return self.turns
        return min(len(self._conversation(index).turns), self.turns)

    def ask(self, index: int, turn: int = 0) -> Ask:
        """Return what a turn of conversation number `index` asks for.

        A real prompt's length is the usual four bytes a token: a guess.
        """
        purpose = f"lengths/{turn}" if turn else "lengths"
        prompt_tokens, output_tokens = self.lengths.draw(index, self._rng(index, purpose))
        if self.conversations:
            real = self._conversation(index)
            prompt_tokens = max(len(real.turns[turn].encode()) // 4, 1)
            output_tokens = real.output_tokens[turn] or output_tokens
        return Ask(index, prompt_tokens, output_tokens, turn)

    def prompt(self, ask: Ask) -> str:
        """Return what the user says in this turn."""
        if self.conversations:
            return self._conversation(ask.index).turns[ask.turn]
        purpose = f"words/{ask.turn}" if ask.turn else "words"
        return " ".join(self._rng(ask.index, purpose).choices(_WORDS, k=ask.prompt_tokens))

    def body(self, ask: Ask, history: Sequence[tuple[str, str]] = ()) -> bytes:
        """Return the streaming request as JSON; `history` is what was said before, and answered.

        Its last event carries the usage.
        """
        system, prompt = self._system(ask.index), self.prompt(ask)
        if self.api is Api.CHAT:
            request = self._openai(ask) | {"messages": _messages(system, history, prompt)}
        else:
            said = [text for turn in history for text in turn]
            text = "\n".join([*([system] if system else []), *said, prompt])
            if self.api is Api.COMPLETIONS:
                request = self._openai(ask) | {"prompt": text}
            else:
                request = self._generate(ask) | {"text": text}
        return json.dumps(request | self.extra).encode()

    def _openai(self, ask: Ask) -> dict[str, object]:
        return {
            "model": self.model,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if self.ignore_eos else {})

    def _generate(self, ask: Ask) -> dict[str, object]:
        sampling = {
            "max_new_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
        }
        return {"stream": True, "sampling_params": sampling}

    def _system(self, index: int) -> str | None:
        own = self._conversation(index).system if self.conversations else None
        if self.prefix is None:
            return own
        shared = _prefix(self.seed, index % self.prefix.count, self.prefix.tokens)
        return shared if own is None else f"{shared} {own}"

    def _conversation(self, index: int) -> Conversation:
        return self.conversations[index % len(self.conversations)]

    def _rng(self, index: int, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/{index}/{purpose}")  # noqa: S311 - load, not secrets


@lru_cache(maxsize=64)
def _prefix(seed: int, number: int, tokens: int) -> str:
    rng = random.Random(f"{seed}/{number}/prefix")  # noqa: S311 - load, not secrets
    return " ".join(rng.choices(_WORDS, k=tokens))


def _messages(
    system: str | None, history: Sequence[tuple[str, str]], prompt: str
) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for said, answered in history:
        messages += [
            {"role": "user", "content": said},
            {"role": "assistant", "content": answered},
        ]
    return [*messages, {"role": "user", "content": prompt}]
