"""The running requests of an engine model, and what each decode step yields. Pure.

What a request's steps will yield is drawn at once when it starts to decode, and sums are kept by
the number of the step. So a step costs the same at any batch: one look at who ends with it, and at
how many tokens it makes.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from loadtest.engine_params import Acceptance, Rng


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence to generate. `key` is the caller's; `cached_tokens` need no prefill."""

    prompt_tokens: int
    max_tokens: int
    key: object = None
    cached_tokens: int = 0
    state: State = State.WAITING
    output_tokens: int = 0
    decode_steps: int = 0
    retractions: int = 0
    # The engine's own: prompt tokens in the cache so far, an abort that waits for the step.
    prefilled_tokens: int = 0
    aborting: bool = False
    # The batch's own: this request's chances; the tokens of each planned step, None for one each;
    # the step of the batch, the output and the steps that the plan starts from.
    chances: tuple[float, ...] = ()
    plan: bytes | None = None
    planned_at: int = 0
    planned_output_tokens: int = 0
    planned_steps: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens that attention reads: prompt and output."""
        return self.prompt_tokens + self.output_tokens


class Batch:
    """Sequences in the order in which they began to decode.

    `drafts` is where a request's chances come from; while `acceptance` is None, a step yields one
    token a request whatever they are. `longest_tokens` are prompt and allowed output of them all.
    """

    def __init__(self, drafts: Acceptance | None) -> None:
        self.drafts = drafts
        self.longest_tokens = 0
        self._acceptance = drafts
        self._members: dict[Sequence, None] = {}
        self._steps = 0
        self._stale = False
        # By the number of a step: the tokens that it yields, and who ends with it.
        self._yields: defaultdict[int, int] = defaultdict(int)
        self._last: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, sequence: Sequence, rng: Rng) -> None:
        """Let a sequence decode that has output to come."""
        sequence.state = State.RUNNING
        self._members[sequence] = None
        self.longest_tokens += sequence.prompt_tokens + sequence.max_tokens
        self._plan(sequence, rng)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out before its end, with the tokens that it has."""
        self._settle(sequence)
        done, plan = self._steps, sequence.plan
        last = self._last_step(sequence)
        self._last[last].remove(sequence)
        if not self._last[last]:
            del self._last[last]
        if plan is not None:
            for step in range(done + 1, last + 1):
                self._yields[step] -= plan[step - sequence.planned_at - 1]
        self._drop(sequence)

    def change_mode(self, acceptance: Acceptance | None, *, new_luck: bool = False) -> None:
        """Decode otherwise as of the next step, with the same chances or, after a change of
        `drafts`, with new ones. `plan_anew` is due before that step ends.
        """
        self._acceptance = acceptance
        self._stale = True
        if new_luck:
            for sequence in self._members:
                sequence.chances = ()

    def plan_anew(self, rng: Rng) -> None:
        """Draw again what is to come, if the mode has changed."""
        if not self._stale:
            return
        self._stale = False
        for sequence in self._members:
            self._settle(sequence)
        self._last.clear()
        self._yields.clear()
        for sequence in self._members:
            self._plan(sequence, rng)

    def output_tokens(self, sequence: Sequence) -> int:
        """Return what a member has got so far."""
        done = self._steps - sequence.planned_at
        got = done if sequence.plan is None else sum(sequence.plan[:done])
        return sequence.planned_output_tokens + got

    def next_yields(self) -> list[tuple[Sequence, int]]:
        """Return what each member gets from the next step, and let it have that already."""
        found = []
        for sequence in self._members:
            plan = sequence.plan
            tokens = 1 if plan is None else plan[self._steps - sequence.planned_at]
            sequence.output_tokens += tokens
            sequence.decode_steps += 1
            found.append((sequence, tokens))
        return found

    def quiet_yields(self) -> Iterator[int]:
        """Tokens of each step before the next one with which a sequence ends; of none that is
        still to be drawn.
        """
        step, each = self._steps + 1, len(self._members)
        while not self._stale and step not in self._last:
            yield each if self._acceptance is None else self._yields[step]
            step += 1

    def step(self, steps: int) -> tuple[int, list[Sequence]]:
        """Take so many steps; return the tokens made and who ended with the last, the only one
        with which any may end.
        """
        before = self._steps
        self._steps = now = before + steps
        if self._acceptance is None:
            made = len(self._members) * steps
        else:
            take = self._yields.pop
            made = sum(take(step, 0) for step in range(before + 1, now + 1))
        ended = self._last.pop(now, [])
        for sequence in ended:
            self._settle(sequence)
            self._drop(sequence)
        return made, ended

    def _plan(self, sequence: Sequence, rng: Rng) -> None:
        if self.drafts is not None and not sequence.chances:
            sequence.chances = self.drafts.draw(rng)
        sequence.planned_at = self._steps
        sequence.planned_output_tokens = sequence.output_tokens
        sequence.planned_steps = sequence.decode_steps
        if self._acceptance is None:
            sequence.plan = None
        else:
            left = sequence.max_tokens - sequence.output_tokens
            sequence.plan = lucky_steps(sequence.chances, left, rng)
            yields = self._yields
            for step, tokens in enumerate(sequence.plan, self._steps + 1):
                yields[step] += tokens
        self._last.setdefault(self._last_step(sequence), []).append(sequence)

    def _last_step(self, sequence: Sequence) -> int:
        plan = sequence.plan
        if plan is not None:
            return sequence.planned_at + len(plan)
        return sequence.planned_at + sequence.max_tokens - sequence.planned_output_tokens

    def _settle(self, sequence: Sequence) -> None:
        sequence.output_tokens = self.output_tokens(sequence)
        sequence.decode_steps = sequence.planned_steps + self._steps - sequence.planned_at

    def _drop(self, sequence: Sequence) -> None:
        del self._members[sequence]
        self.longest_tokens -= sequence.prompt_tokens + sequence.max_tokens


def lucky_steps(chances: tuple[float, ...], tokens: int, rng: Rng) -> bytes:
    """Return what each step yields until there are so many tokens: one, and one for each chance
    that a step's luck meets.
    """
    draw = rng.random
    ascending = chances[::-1]
    longest = len(chances) + 1
    steps = bytearray()
    while tokens > 0:
        # Chances fall, so those above the luck are the first ones.
        got = longest - bisect_right(ascending, draw())
        steps.append(got)
        tokens -= got
    if tokens < 0:
        steps[-1] += tokens
    return bytes(steps)
