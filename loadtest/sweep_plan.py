"""What a sweep measures, in which order. Pure.

Every round measures every target at every level. Targets of a level follow one another closely and
in another order each round, and levels go up in one round and down in the next, so that a machine
that warms up or is disturbed does not favour one target. A reference point, the first target at
the middle level, is measured before each round and after the last: if it moved, the machine did.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS_MAX = 64
ROUNDS_MAX = 100
TARGETS_MAX = 16
# How far apart the reference point's rates may lie, as a share of their median.
DRIFT_SHARE_MAX = 0.03


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement: a target at a level. `round` is None for the reference point."""

    target: str
    concurrency: int
    round: int | None


def plan(targets: Sequence[str], levels: Sequence[int], rounds: int) -> list[Visit]:
    """Return the visits in their order."""
    reference = reference_of(targets, levels)
    visits = []
    for number in range(rounds):
        visits.append(reference)
        places = list(enumerate(levels))
        for place, level in places if number % 2 == 0 else reversed(places):
            turn = (number + place) % len(targets)
            visits += [Visit(t, level, number) for t in (*targets[turn:], *targets[:turn])]
    return [*visits, reference]


def reference_of(targets: Sequence[str], levels: Sequence[int]) -> Visit:
    """Return the visit that is repeated."""
    return Visit(targets[0], levels[len(levels) // 2], None)


@dataclass(frozen=True, slots=True)
class Drift:
    """The reference point's rates in the order of time, and by how much they lie apart."""

    reference: Visit
    tok_s: tuple[float, ...]

    @property
    def moved_share(self) -> float | None:
        """Highest less lowest, over the median; None of fewer than two."""
        if len(self.tok_s) < 2:
            return None
        ordered = sorted(self.tok_s)
        middle = ordered[len(ordered) // 2]
        return (ordered[-1] - ordered[0]) / middle if middle else None

    @property
    def moved(self) -> bool:
        """Whether it is more than a sweep may bear."""
        share = self.moved_share
        return share is not None and share > DRIFT_SHARE_MAX

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        share = self.moved_share
        return {
            "target": self.reference.target,
            "concurrency": self.reference.concurrency,
            "tok_s": list(self.tok_s),
            "moved_share": None if share is None else round(share, 4),
            "moved": self.moved,
        }
