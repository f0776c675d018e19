"""Which arms run side by side, at which levels, how often. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Arms measured side by side, the levels, and the rounds wanted."""

    number: int
    arms: tuple[str, ...]
    levels: tuple[int, ...]
    rounds: int


def parse_stages(
    words: Sequence[str], known: Sequence[str], levels: tuple[int, ...]
) -> list[Stage]:
    """Read `ARM[,ARM...][@LEVEL,...[@ROUNDS]]`; at most three arms fit on the GPU together."""
    stages = []
    for number, word in enumerate(words, 1):
        arms, _, rest = word.partition("@")
        wanted_levels, _, rounds = rest.partition("@")
        names = tuple(arms.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(known)}")
        if len(names) > 3 or len(set(names)) != len(names):
            raise ValueError(f"stage {word!r}: one to three different arms")
        chosen = (
            tuple(int(level) for level in wanted_levels.split(",")) if wanted_levels else levels
        )
        stages.append(Stage(number, names, chosen, int(rounds or 3)))
    return stages
