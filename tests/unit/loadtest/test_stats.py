import statistics
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import Ending, RequestRow
from loadtest.stats import percentile, summarise, switches, timeline, token_counts

FLOATS = st.lists(st.floats(0, 1e6), min_size=2, max_size=50)


def row(sent_s: float = 0.0, **fields: object) -> RequestRow:
    made = RequestRow(index=0, intended_s=sent_s, sent_s=sent_s, max_tokens=100)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@given(FLOATS, st.floats(0, 1))
def test_a_percentile_is_that_of_numpy(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share * 100))


@given(FLOATS)
def test_a_percentile_is_that_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 0.99) == pytest.approx(cuts[98])
    assert percentile(values, 0.50) == pytest.approx(statistics.median(values))


def test_a_percentile_of_nothing_is_unknown() -> None:
    assert percentile([], 0.5) is None


def test_tokens_without_usage_are_estimated_by_the_events_of_the_same_server() -> None:
    rows = [
        row(server="spec", tokens=22, events=10),
        row(server="base", tokens=10, events=10),
        row(server="spec", events=5),
        row(server="base", events=5),
        row(server=None, events=0),
    ]
    assert token_counts(rows) == pytest.approx([22, 10, 11, 5, 0])


def test_switches_count_changes_in_the_order_of_sending() -> None:
    servers = [(0.0, "a"), (3.0, "b"), (1.0, "a"), (2.0, None), (4.0, "b"), (5.0, "a")]
    assert switches(row(at, server=server) for at, server in servers) == 2


def finished(sent_s: float, first_s: float, gaps_s: list[float], tokens: int) -> RequestRow:
    return row(
        sent_s,
        first_s=first_s,
        last_s=first_s + sum(gaps_s),
        end_s=first_s + sum(gaps_s),
        gaps_s=array("d", gaps_s),
        events=len(gaps_s) + 1,
        tokens=tokens,
        status=200,
        server="base",
        ending=Ending.OK,
    )


def test_a_summary_has_the_figures_of_its_rows() -> None:
    rows = [finished(0.0, 0.1, [0.02, 0.02], 3), finished(1.0, 1.3, [0.04, 0.04], 3)]
    summary = summarise(rows, duration_s=2.0)
    assert summary["tokens"] == 6
    assert summary["tok_s"] == 3.0
    assert (summary["requests"], summary["errors"]) == (2, 0)
    assert summary["ttft_ms"] == {"p50": 200.0, "p99": 298.0}
    assert summary["itl_ms"] == {"p50": 30.0, "p99": 40.0}
    assert summary["e2e_ms"] == {"p50": 260.0, "p99": 377.6}


def test_the_inter_token_latency_shares_a_gap_among_the_tokens_of_an_event() -> None:
    summary = summarise([finished(0.0, 0.1, [0.02] * 9, 20)], duration_s=1.0)
    assert summary["itl_ms"] == {"p50": 10.0, "p99": 10.0}


def test_latency_counts_from_the_intended_start() -> None:
    late = finished(1.0, 1.1, [], 1)
    late.intended_s = 0.5
    assert summarise([late], 2.0)["ttft_ms"] == {"p50": 600.0, "p99": 600.0}


def test_a_faster_clock_gives_engine_time() -> None:
    rows = [finished(0.0, 0.1, [0.02, 0.02], 30)]
    summary = summarise(rows, duration_s=2.0, clock=10.0)
    assert summary["tok_s"] == 1.5
    assert summary["ttft_ms"] == {"p50": 1000.0, "p99": 1000.0}
    assert summary["duration_s"] == 20.0


def test_errors_are_counted_by_kind_and_a_cut_request_is_none() -> None:
    rows = [
        row(ending=Ending.CONNECT, error="refused"),
        row(ending=Ending.CONNECT, error="refused"),
        row(ending=Ending.CUT, events=1),
    ]
    summary = summarise(rows, 1.0)
    assert summary["errors"] == 2
    assert summary["error_kinds"] == {"connect": 2}
    assert summary["error_examples"] == ["refused"]
    assert (summary["cut"], summary["tokens_estimated"]) == (1, 1)
    assert summary["ttft_ms"] == {"p50": None, "p99": None}


def test_a_timeline_spreads_tokens_over_the_steps_they_arrived_in() -> None:
    line = timeline([finished(0.0, 0.5, [1.0, 1.0], 6)], duration_s=4.0, step_s=1.0)
    assert line.at_s == (0.5, 1.5, 2.5, 3.5)
    assert line.tok_s == (2.0, 2.0, 2.0, 0.0)
    assert line.in_flight == {"base": (1.0, 1.0, 0.5, 0.0)}
