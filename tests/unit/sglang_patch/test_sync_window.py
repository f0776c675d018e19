"""The ring of OFF steps that the draft is behind, against a list of what was kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patch.sync_window import SyncWindow


@given(
    size=st.integers(1, 9),
    longest=st.integers(1, 12),
    actions=st.lists(st.sampled_from(["step", "step", "step", "write", "resume"]), max_size=60),
)
def test_what_is_owed_is_in_the_ring_in_order(size: int, longest: int, actions: list[str]) -> None:
    window, ring, owed, cold, steps = SyncWindow(size), [0] * size, list[int](), False, 0
    for action in actions:
        if action == "step" and not window.full:
            steps += 1
            ring[window.advance()] = steps
            owed, cold = [*owed, steps], True
            assert ring[window.column] == steps
        elif action == "write":
            window.mark_written()
            owed = []
        elif action == "resume":
            window.mark_resumed()
            owed, cold = [], False
        slices = window.owed(longest)
        assert [step for part in slices for step in ring[part]] == owed
        assert all(0 < part.stop - part.start <= longest for part in slices)
        assert window.full == (len(owed) == size)
        assert window.cold == cold


def test_the_last_step_stays_in_the_ring_after_it_was_written() -> None:
    """An ON step drafts from it."""
    window = SyncWindow(2)
    columns = [window.advance(), window.advance()]
    window.mark_written()
    assert window.cold
    assert window.column == columns[-1]


def test_no_step_is_overwritten_that_is_owed() -> None:
    window = SyncWindow(1)
    window.advance()
    with pytest.raises(RuntimeError, match="1 OFF steps are owed"):
        window.advance()
