from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import Ending, RequestRow
from loadtest.steady import figures, stretch


def row(first_s: float, gaps_s: list[float], tokens: int | None = None) -> RequestRow:
    made = RequestRow(index=0, intended_s=first_s - 0.5, sent_s=first_s - 0.5, max_tokens=100)
    made.first_s, made.gaps_s = first_s, array("d", gaps_s)
    made.events, made.tokens = len(gaps_s) + 1, tokens
    made.end_s = made.last_s = first_s + sum(gaps_s)
    made.status, made.server, made.ending = 200, "base", Ending.OK
    return made


def test_a_gap_that_the_stretch_cuts_counts_by_its_share() -> None:
    seen = stretch([row(0.0, [1.0] * 10, 11)], 2.5, 5.25)
    assert (seen.tokens, seen.decode_tokens) == pytest.approx((2.75, 2.75))
    assert seen.tpot_s == pytest.approx(1.0)
    assert seen.sequences == pytest.approx(1.0)


def test_the_time_per_token_does_not_depend_on_where_the_stretch_begins() -> None:
    rows = [row(0.0, [0.092] * 100, 101) for _ in range(4)]
    for start_s in (1.0, 1.03, 1.07):
        assert stretch(rows, start_s, start_s + 3.0).tpot_s == pytest.approx(0.092)


def test_tokens_of_an_event_are_shared_over_the_gaps_without_the_first() -> None:
    """A speculating engine: one token with the first event, 2.2 with each of the others."""
    seen = stretch([row(0.0, [0.01] * 50, 111)], 0.1, 0.3)
    assert seen.tok_s == pytest.approx(220)
    assert seen.tpot_s == pytest.approx(0.01 / 2.2)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20), st.floats(0.0, 10.0))
def test_two_halves_hold_all_tokens_once(gaps_s: list[float], cut_s: float) -> None:
    rows = [row(0.0, gaps_s, 3 * len(gaps_s) + 1)]
    whole = stretch(rows, 0.0, 30.0)
    parts = stretch(rows, 0.0, cut_s).tokens + stretch(rows, cut_s, 30.0).tokens if cut_s else 0
    assert whole.tokens == pytest.approx(3 * len(gaps_s) + 1)
    assert parts == pytest.approx(whole.tokens) or not cut_s


def test_a_request_without_an_answer_takes_no_part() -> None:
    failed = RequestRow(index=0, intended_s=0.0, sent_s=0.0, max_tokens=1, ending=Ending.CONNECT)
    seen = stretch([failed], 0.0, 1.0)
    assert (seen.tokens, seen.tpot_s) == (0.0, None)


def test_figures_are_of_the_stretch_and_errors_of_the_run() -> None:
    failed = RequestRow(index=1, intended_s=0.0, sent_s=0.0, max_tokens=1)
    failed.ending, failed.error, failed.end_s = Ending.CONNECT, "refused", 0.1
    rows = [row(1.0, [0.1] * 20, 21), row(4.0, [0.2] * 20, 21), failed]
    found = figures(rows, 3.5, 10.0, clock=2.0)
    assert (found["requests"], found["finished"]) == (1, 1)
    assert (found["errors"], found["error_kinds"]) == (1, {"connect": 1})
    assert found["ttft_ms"] == {"p50": 1000.0, "p99": 1000.0}
    assert found["e2e_ms"] == {"p50": 9000.0, "p99": 9000.0}
    assert found["itl_ms"] == {"p50": 400.0, "p99": 400.0}
    assert found["duration_s"] == 13.0
