"""What holds for the waiting line whatever happens, in whatever order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.admission import Line, Priority


class Histories(RuleBasedStateMachine):
    """A line beside a plain list that says what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.size_max = 4
        self.line: Line[int] = Line(self.size_max)
        self.model: list[tuple[int, Priority, int, float]] = []
        self.now = 0.0
        self.number = 0

    @rule(priority=st.sampled_from(Priority), sequences=st.integers(0, 9), wait=st.floats(0, 5))
    def join(self, priority: Priority, sequences: int, wait: float) -> None:
        self.now += wait
        self.number += 1
        full = len(self.model) >= self.size_max
        batch = [item for item in self.model if item[1] is Priority.BATCH]
        out = self.line.join(self.number, priority, sequences, self.now)
        if full and (priority is Priority.BATCH or not batch):
            assert out == self.number
            return
        if full:
            assert out == batch[-1][0]
            self.model.remove(batch[-1])
        else:
            assert out is None
        self.model.append((self.number, priority, sequences, self.now))

    @rule(place=st.integers(0, 10))
    def leave(self, place: int) -> None:
        if self.model:
            item = self.model.pop(place % len(self.model))
            assert self.line.leave(item[0])
            assert not self.line.leave(item[0])
        assert not self.line.leave(-1)

    @rule()
    def serve(self) -> None:
        head = self.line.head()
        assert head == (self.ordered()[0] if self.model else None)
        if head is not None:
            self.line.leave(head)
            self.model = [item for item in self.model if item[0] != head]

    @rule(size_max=st.integers(0, 6))
    def resize(self, size_max: int) -> None:
        self.size_max = self.line.size_max = size_max

    @rule(wait=st.floats(0, 20))
    def late(self, wait: float) -> None:
        since = self.now - wait
        late = {number for number, _, _, at in self.model if at < since}
        assert set(self.line.overdue(since)) == late

    def ordered(self) -> list[int]:
        return [item[0] for priority in Priority for item in self.model if item[1] is priority]

    @invariant()
    def it_is_what_the_list_says(self) -> None:
        assert self.line.first(len(self.model) + 1) == self.ordered()
        assert self.line.first(2) == self.ordered()[:2]
        assert len(self.line) == len(self.model)
        for priority in Priority:
            mine = [item for item in self.model if item[1] is priority]
            assert self.line.depth(priority) == len(mine)
        interactive = sum(n for _, p, n, _ in self.model if p is Priority.INTERACTIVE)
        assert self.line.sequences_before(Priority.INTERACTIVE) == interactive
        assert self.line.sequences_before(Priority.BATCH) == sum(n for _, _, n, _ in self.model)


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
