"""The tokens that a simulated engine writes: one long tape, of which every reply is a stretch.

Prose, Chinese and code alternate, so that the bytes of a token vary as they do in real replies: 1
to 12, escapes counted. The tape is kept as the JSON string that goes out and as its token ids, with
the offset of each token: the text of any stretch is one slice.
"""

import random
import zlib
from collections.abc import Iterator
from functools import cache

import orjson

# Replies start within the period; the stretch after it lets them run on without a seam.
PERIOD_TOKENS = 8192
STRETCH_TOKENS = 8192

_PROSE = tuple(
    """
    the of and to in a is that for it as was with on be by at which this from are or an not
    have they had were one all their but there been when who will more no if out so said what
    up its about into than them can only other new some could time these two may then do first
    any my now such like our over man me even most made after also did many before must
    through back years where much your way well down should because each just those people how
    too little state good very make world still own see men work long get here between both
    latency throughput request server decoding speculative measurement understanding
    architecture
    """.split()  # noqa: SIM905
)
_CODE = (
    "(", ")", "():\n", "\n    ", "\n        ", " =", " ==", " return", " if", " for", " in",
    " def", " self", ".", ",", " \"", "\"", "[", "]", " None", " +", " 0", " 1", "_id", "_name",
    " len", " range", " not", ":", "\\n", " #",
)  # fmt: skip
_CHINESE = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下"
    "过子说产种面而方后多定行学法所民得经十三之进着等部度家电力里如水化高自二理起小物现实加量都"
    "两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形相全表间样与关各重"
    "新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者最立代想"
)
_PUNCTUATION = (",", ".", ".", "!", "?", " -", ";")


def _pieces(rng: random.Random) -> Iterator[str]:
    while True:
        for _ in range(rng.randrange(80, 300)):
            word = rng.choice(_PROSE)
            yield rng.choice(_PUNCTUATION) if rng.random() < 0.1 else " " + word
        for _ in range(rng.randrange(20, 80)):
            yield rng.choice(_CHINESE)
        for _ in range(rng.randrange(40, 120)):
            yield rng.choice(_CODE)


class Tape:
    """The token sequence, and slices of it. Positions and counts are in tokens."""

    def __init__(self, seed: int = 20) -> None:
        rng = random.Random(seed)  # noqa: S311 - not for secrets
        vocabulary: dict[str, int] = {}
        text, ids = bytearray(), bytearray()
        self._text_at, self._ids_at = [0], [0]
        for _, piece in zip(range(PERIOD_TOKENS + STRETCH_TOKENS), _pieces(rng), strict=False):
            text += orjson.dumps(piece)[1:-1]
            ids += b"%d," % vocabulary.setdefault(piece, 1000 + len(vocabulary))
            self._text_at.append(len(text))
            self._ids_at.append(len(ids))
        self._text, self._ids = bytes(text), bytes(ids)

    def text(self, start: int, count: int) -> bytes:
        """Return the tokens' text as the inside of a JSON string: escaped, without the quotes."""
        start %= PERIOD_TOKENS
        if count > STRETCH_TOKENS:
            rest = self.text(start + STRETCH_TOKENS, count - STRETCH_TOKENS)
            return self.text(start, STRETCH_TOKENS) + rest
        at = self._text_at
        return self._text[at[start] : at[start + count]]

    def ids(self, start: int, count: int) -> bytes:
        """Return the tokens' ids as a JSON array."""
        parts = []
        while count > 0:
            start %= PERIOD_TOKENS
            take = min(count, STRETCH_TOKENS)
            parts.append(self._ids[self._ids_at[start] : self._ids_at[start + take]])
            start, count = start + take, count - take
        return b"[" + b"".join(parts)[:-1] + b"]"


@cache
def tape() -> Tape:
    """Return the one tape: engines of one model say the same to the same prompt."""
    return Tape()


def start_of(prompt: bytes, index: int = 0) -> int:
    """Return where the reply to a prompt starts; `index` tells the choices of one request apart."""
    return (zlib.crc32(prompt) + index * 977) % PERIOD_TOKENS


def count_tokens(text: str) -> int:
    """Estimate the tokens of a prompt: its words, or a token for six bytes if those are more."""
    return max(1, len(text.split()), len(text.encode()) // 6)
