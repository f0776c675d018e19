"""Who gets in now, and who waits: the room that servers have, and the line in front of it.

Room is counted in sequences and in prompt tokens that wait for a first token, because a server has
a limit of either: one of few long prompts may be as full as one of many short ones.

The line is first come, first served within a class. Interactive requests go before batch requests,
however long those have waited: batch work is what is left over.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice
from math import ceil, exp
from typing import Generic, NamedTuple, TypeVar

from router.core.types import RequestShape, ServerLoad

T = TypeVar("T", bound=Hashable)

# The pace at which the past fades.
MEMORY_S = 30.0
# Clients of OpenAI's kind give up at a longer wait, and hurry at a shorter one.
RETRY_AFTER_S_MAX = 120


class Priority(StrEnum):
    """A request's class, first the one that goes first. A closed set: header, logs and metrics."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Waited(StrEnum):
    """How a wait ended. A closed set: metrics and logs use these words.

    Served; or not: the line was full, it gave way to an interactive request, its time was over, its
    client left (or was told that the router stops), or the router failed.
    """

    SERVED = "served"
    FULL = "full"
    SHED = "shed"
    TIMEOUT = "timeout"
    CLIENT_LEFT = "client_left"
    TURNED_AWAY = "turned_away"


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be in flight at once. None: any number."""

    sequences: int | None = None
    prefill_tokens: int | None = None

    def holds(self, shape: RequestShape, sequences: int, prefill_tokens: int) -> bool:
        """Whether a request fits beside so much.

        What is larger than the whole room fits where there is nothing else: it would never run.
        """
        most = self.sequences
        if most is not None and sequences and sequences + shape.sequences > most:
            return False
        most = self.prefill_tokens
        return most is None or not prefill_tokens or prefill_tokens + shape.prompt_tokens <= most

    @property
    def endless(self) -> bool:
        """Whether it bounds nothing."""
        return self.sequences is None and self.prefill_tokens is None


@dataclass(frozen=True, slots=True)
class Limits:
    """The room of all servers together, of each, and of those that have their own."""

    total: Room = field(default_factory=Room)
    each: Room = field(default_factory=Room)
    of: Mapping[str, Room] = field(default_factory=dict)

    @property
    def endless(self) -> bool:
        """Whether nothing is bounded."""
        return (
            self.total.endless
            and self.each.endless
            and all(room.endless for room in self.of.values())
        )

    def with_room(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
    ) -> Sequence[ServerLoad]:
        """Return the candidates that have room for a request; `loads` are those of all servers.

        A request of no sequences, such as a list of models, fits anywhere.
        """
        if not shape.sequences:
            return candidates
        total = self.total
        if not total.endless and not total.holds(
            shape,
            sum(load.sequences for load in loads),
            sum(load.prefill_tokens for load in loads),
        ):
            return ()
        return [
            load
            for load in candidates
            if self.of.get(load.name, self.each).holds(shape, load.sequences, load.prefill_tokens)
        ]


class _Place(NamedTuple):
    since: float
    sequences: int


class Line(Generic[T]):
    """The waiting, `size_max` of them at most. Each operation costs the same at any length."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._length = 0
        self._classes: dict[Priority, OrderedDict[T, _Place]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._sequences = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        """How many wait."""
        return self._length

    def depth(self, priority: Priority) -> int:
        """How many of a class wait."""
        return len(self._classes[priority])

    def holds_back(self, priority: Priority) -> bool:
        """Whether a newcomer of a class would overtake somebody by not waiting."""
        if self._classes[Priority.INTERACTIVE]:
            return True
        return priority is Priority.BATCH and bool(self._classes[Priority.BATCH])

    def sequences_before(self, priority: Priority) -> int:
        """Return the sequences of those that wait and go before a newcomer of a class."""
        if priority is Priority.INTERACTIVE:
            return self._sequences[Priority.INTERACTIVE]
        return sum(self._sequences.values())

    def join(self, item: T, priority: Priority, sequences: int, now: float) -> T | None:
        """Put an item at the end of its class; return who does not wait (any longer) for that.

        In a full line the batch item that came last gives way to an interactive one; if none does,
        it is the newcomer that is returned, and nothing changed.
        """
        gives_way: T | None = None
        if self._length >= self.size_max:
            batch = self._classes[Priority.BATCH]
            if priority is Priority.BATCH or not batch:
                return item
            gives_way = next(reversed(batch))
            self.leave(gives_way)
        self._classes[priority][item] = _Place(now, sequences)
        self._length += 1
        self._sequences[priority] += sequences
        return gives_way

    def leave(self, item: T) -> bool:
        """Take an item out, wherever it stands. False if it does not wait."""
        for priority, waiting in self._classes.items():
            place = waiting.pop(item, None)
            if place is not None:
                self._sequences[priority] -= place.sequences
                self._length -= 1
                return True
        return False

    def head(self) -> T | None:
        """Return whose turn it is, None if nobody waits."""
        for waiting in self._classes.values():
            for item in waiting:
                return item
        return None

    def first(self, count: int) -> list[T]:
        """Return the next so many that wait, in the order in which they would go."""
        return list(islice(chain.from_iterable(self._classes.values()), count))

    def overdue(self, since: float) -> list[T]:
        """Return those that have waited since before a time. They still wait."""
        late: list[T] = []
        for waiting in self._classes.values():
            for item, place in waiting.items():
                if place.since >= since:
                    break
                late.append(item)
        return late


class Lifetime:
    """How long a sequence is in flight, of late, by Little's law: time in flight per end."""

    def __init__(self) -> None:
        self._at = 0.0
        self._total = (0.0, 0)
        self._sequence_s = 0.0
        self._ended = 0.0

    def observe(self, now: float, sequence_s: float, ended: int) -> None:
        """Take the totals of all servers: seconds that sequences were in flight, and their ends."""
        kept = exp(-max(0.0, now - self._at) / MEMORY_S)
        self._sequence_s = self._sequence_s * kept + sequence_s - self._total[0]
        self._ended = self._ended * kept + ended - self._total[1]
        self._at = now
        self._total = (sequence_s, ended)

    def retry_after_s(self, sequences_before: int, in_flight: int) -> int:
        """Return in how many whole seconds so many sequences and one more will have begun.

        With n in flight, one ends every lifetime / n. Where none has ended yet, the lifetime is at
        least what was seen.
        """
        lifetime_s = self._sequence_s / max(self._ended, 1.0)
        wait_s = (sequences_before + 1) * lifetime_s / max(in_flight, 1)
        return max(1, min(ceil(wait_s), RETRY_AFTER_S_MAX))
