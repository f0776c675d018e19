"""How many tokens a text is, once the tokenizer's vocabulary is known.

Tokenizers of large models cut a text into pieces by much the same rule (a word with the space
before it, a run of digits, of marks, of white space), and merge within a piece only. There, the
longest known token at each place gives the same count as their merges do, but for one token in some
hundreds. Pieces repeat, so that most are counted by a look-up.
"""

import re
from collections.abc import Iterable

# Letters are told by their code points, which is twice as fast as by their class. In other scripts
# a piece is what stands between spaces, which gives the same counts.
_LETTER, _DIGIT = r"a-zA-Z\u00c0-\u024f", "0-9"
_PIECE = re.compile(
    rf"[^\r\n{_LETTER}{_DIGIT}]?[{_LETTER}]+"
    rf"|[{_DIGIT}]+"
    rf"| ?[^\s{_LETTER}{_DIGIT}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
_SPACE_AND_HAN = re.compile(" [\u3040-\u30ff\u4e00-\u9fff]")
_PIECES_MAX = 20_000
_PIECE_CHARACTERS_MAX = 20  # of those that are kept
_CHINESE = "\u2e80"  # from here on words are not divided, and long pieces hardly repeat
_CHINESE_CHARACTERS_MAX = 3
TOKEN_CHARACTERS_MAX = 64


class Vocabulary(dict[str, int]):
    """The tokens of a piece of text, by the piece. It holds a bounded number of them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        super().__init__()
        self._tokens = frozenset(t for t in tokens if 0 < len(t) <= TOKEN_CHARACTERS_MAX)
        # By its first two characters, how long a token can be.
        self._longest: dict[str, int] = {}
        for token in self._tokens:
            if len(token) > 1:
                start = token[:2]
                self._longest[start] = max(len(token), self._longest.get(start, 0))
        # Some decoders drop the space that a token begins with.
        self._spaced = any(token[0] == " " and len(token) > 1 for token in self._tokens)
        self._joins_han = any(_SPACE_AND_HAN.match(token) for token in self._tokens)

    @property
    def size(self) -> int:
        """How many tokens it has that are text."""
        return len(self._tokens)

    def count(self, text: str) -> int:
        """Return how many tokens a text is."""
        return sum(map(self.__getitem__, _PIECE.findall(text)))

    def __missing__(self, piece: str) -> int:
        count = self._greedy(piece if self._spaced or len(piece) == 1 else piece.removeprefix(" "))
        limit = _PIECE_CHARACTERS_MAX if piece[-1] < _CHINESE else _CHINESE_CHARACTERS_MAX
        if len(piece) <= limit:
            if len(self) >= _PIECES_MAX:
                self.clear()
            self[piece] = count
        return count

    def _greedy(self, piece: str) -> int:
        tokens, longest = self._tokens, self._longest
        count = at = 0
        end = len(piece)
        if self._joins_han and _SPACE_AND_HAN.match(piece) and piece[:2] not in longest:
            # The space has taken the first byte of the character with it.
            count = at = 2
        while at < end:
            count += 1
            length = longest.get(piece[at : at + 2], 1)
            if length > 2:
                length = min(length, end - at)
                while length > 1 and piece[at : at + length] not in tokens:
                    length -= 1
            if length == 1 and (character := piece[at]) not in tokens:
                # Made of tokens that are bytes, some of them of two.
                count += max(0, len(character.encode("utf-8", "replace")) - 2)
            at += length
        return count
