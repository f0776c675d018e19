"""Which draft KV the OFF steps still owe: the arithmetic of a ring of steps. Pure.

Every request that decodes takes part in every decode step, so one count of OFF steps tells of all
requests together where in the ring a step's states are. Columns, one a step, are reused after
`size` steps.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class SyncWindow:
    """Counts OFF steps, those whose draft KV is written, and those before the last ON step.

    `size` is the most steps that may be owed. `column` is where the last step's states are.
    """

    size: int
    steps: int = 0
    written: int = 0
    resumed: int = 0

    @property
    def full(self) -> bool:
        """Whether another step would overwrite states whose draft KV is not written."""
        return self.steps - self.written == self.size

    @property
    def cold(self) -> bool:
        """Whether the draft has yet to draft from what OFF steps added."""
        return self.steps > self.resumed

    @property
    def column(self) -> int:
        """The column of the last step."""
        return self.steps % self.size

    def advance(self) -> int:
        """Begin an OFF step, and return its column. RuntimeError if the window is full."""
        if self.full:
            raise RuntimeError(f"{self.size} OFF steps are owed to the draft, and none was written")
        self.steps += 1
        return self.column

    def owed(self, longest: int) -> list[slice]:
        """Return the columns of the steps that are owed, the earliest first, in slices of at most
        `longest`.
        """
        slices, step = [], self.written + 1
        while step <= self.steps:
            start = step % self.size
            length = min(longest, self.steps + 1 - step, self.size - start)
            slices.append(slice(start, start + length))
            step += length
        return slices

    def mark_written(self) -> None:
        """The draft KV of all steps is written."""
        self.written = self.steps

    def mark_resumed(self) -> None:
        """The draft drafts from the last position of every request."""
        self.written = self.resumed = self.steps
