"""Twenty-five bugs that routers of this kind have had, each with the tests here that cover it.

Where a bug has tests already they are named; what had none is tested below.
"""

import ast
import asyncio
import json
from functools import cache
from pathlib import Path

import pytest

from router.settings import Timeouts
from tests.integration.rig import CHAT, DONE, Call, answer, event, running

TESTS = Path(__file__).parents[1]

KNOWN = {
    "a client that leaves in prefill leaves the engine generating": (
        "test_a_client_that_leaves_closes_and_aborts_upstream",
        "test_a_client_that_leaves_stops_its_engine",
    ),
    "the in-flight gauge climbs or goes negative": (
        "test_late_and_repeated_calls_change_nothing",
        "test_ten_thousand_random_disconnects_leave_nothing_behind",
    ),
    "the clean-up of a stream never runs": (
        "test_a_client_that_leaves_while_its_server_is_dialled_gives_its_lease_back",
    ),
    "cancelled requests leave orphans in the pool": (
        "test_ten_thousand_random_disconnects_leave_nothing_behind",
    ),
    "it stalls at a hundred streams": (
        "test_three_hundred_streams_run_at_once",
    ),
    "a long prefill or stream is cut by a timeout for web pages": (
        "test_a_long_prefill_and_a_long_stream_are_bounded_by_silence_alone",
    ),
    "a request meets a connection that the server is just closing": (
        "test_a_post_on_a_connection_that_went_stale_is_not_sent_twice",
        "test_idle_connections_expire_before_the_engine_closes_them",
        "test_connections_are_reused_youngest_first",
    ),
    "a request that is sent again generates twice": (
        "test_a_connection_that_breaks_under_a_request_is_no_reason_to_send_it_again",
        "test_what_may_have_run_is_never_sent_again",
    ),
    "retries of several layers multiply": (
        "test_two_refusals_are_the_second_engines_own_error_and_not_to_be_retried",
        "test_retries_of_refusals_have_a_budget",
        "test_retry_after_is_honest_about_how_long_requests_take",
    ),
    "half an answer is taken for a whole one": (
        "test_a_fault_of_a_server_in_its_answer",
        "test_the_official_client_raises_when_a_stream_dies",
    ),
    "an error inside a 200 counts as success": (
        "test_an_error_in_a_200_is_not_recorded_as_success",
        "test_an_error_event_is_seen_wherever_it_is_cut",
    ),
    "characters that are cut between reads are garbled": (
        "test_utf8_cut_between_chunks_arrives_whole",
        "test_cuts_change_nothing",
    ),
    "a length or an encoding does not fit its body": (
        "test_a_compressed_answer_keeps_its_headers_and_bytes",
        "test_headers_of_one_hop_stop_there_and_all_others_pass",
    ),
    "memory grows with slow clients": (
        "test_a_slow_client_holds_its_engine_back_and_gets_every_byte",
        "test_a_client_that_stops_reading_for_good_is_given_up",
    ),
    "something blocks the event loop, and probes fail": (
        "test_a_late_loop_is_reported_until_the_watch_is_stopped",
        "test_a_stuck_reader_costs_lines_and_not_time",
    ),
    "a shutdown hangs on streams, or kills them": (
        "test_at_sigterm_new_work_is_refused_and_a_stream_goes_on_to_its_end",
        "test_after_the_drain_timeout_streams_get_an_error_event_and_others_a_503",
    ),
    "a layer between breaks streaming or hides that a client left": (
        "test_what_the_inlet_reads_and_sets_is_there",
        "test_a_client_that_closes_its_sending_side_counts_as_gone",
    ),
    "all requests go to one server between two polls": (
        "test_a_burst_is_spread_though_no_server_was_asked",
    ),
    "stale or malformed figures of a server break the routing": (
        "test_nonsense_ends_nothing",
        "test_a_report_that_is_too_old_is_forgotten_and_the_core_told_so",
    ),
    "a request counts the same before and after its first token": (
        "test_prompts_that_wait_for_a_first_token_take_room_until_it_comes",
    ),
    "affinity makes a hotspot": (
        "test_a_conversation_stays_with_its_server_where_that_costs_little",
    ),
    "it flaps between servers": (
        "test_a_mode_lasts_for_the_dwell_whatever_the_load",
    ),
    "a bad client or a full queue takes a server out": (
        "test_overload_and_what_a_client_did_wrong_open_no_breaker",
        "test_the_last_server_is_never_taken_out_by_its_breaker",
        "test_a_server_from_which_tokens_flow_is_not_probed",
    ),
    "fields or headers vanish": (
        "test_a_plain_request_and_its_answer_keep_every_byte",
        "test_splicing_adds_one_key_and_changes_no_other_byte",
    ),
    "metrics have labels of clients' making": (
        "test_what_clients_invent_is_no_label",
        "test_a_status_that_http_does_not_know_is_other",
    ),
}  # fmt: skip


@cache
def names() -> frozenset[str]:
    """The names of all tests here."""
    paths = TESTS.rglob("test_*.py")
    nodes = (node for path in paths for node in ast.parse(path.read_text()).body)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in nodes if isinstance(node, functions))


def test_there_are_twenty_five() -> None:
    assert len(KNOWN) == 25


@pytest.mark.parametrize("bug", KNOWN)
def test_the_tests_of_a_known_bug_exist(bug: str) -> None:
    assert KNOWN[bug]
    assert set(KNOWN[bug]) <= names()


@pytest.mark.anyio
async def test_a_long_prefill_and_a_long_stream_are_bounded_by_silence_alone() -> None:
    """Whatever it lasts in all: only a pause that is too long ends a stream."""

    async def script(call: Call) -> None:
        await call.stream_head()
        while not rig.relay.calls or rig.relay.clock() - began < 3 * limit_s:
            await call.chunk(event("a"))
        await call.chunk(DONE)
        await call.end()

    limit_s = 0.2
    timeouts = Timeouts(connect_s=limit_s, first_byte_s=limit_s, idle_s=limit_s)
    async with running(timeouts=timeouts) as rig:
        began = rig.relay.clock()
        rig.spec.script = script
        response = await rig.http.post(CHAT, json={"messages": [], "stream": True})
        assert response.content.endswith(DONE)
        assert (await rig.record()).duration_s > 2 * limit_s
    defaults = Timeouts()
    assert defaults.first_byte_s >= 600
    assert defaults.idle_s >= 300


@pytest.mark.anyio
async def test_a_burst_is_spread_though_no_server_was_asked() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.gone()

    async with running(policy="least-inflight") as rig:
        rig.spec.script = rig.base.script = script
        body = json.dumps({"messages": [], "stream": True}).encode()
        clients = [await rig.post(CHAT, body) for _ in range(16)]
        while len(rig.spec.calls) + len(rig.base.calls) < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert (len(rig.spec.calls), len(rig.base.calls)) == (8, 8)
        for _, writer in clients:
            writer.close()
        await rig.settled()


@pytest.mark.anyio
async def test_what_clients_invent_is_no_label() -> None:
    """The endpoint of a record, which becomes a label, is of a closed set."""
    async with running() as rig:
        rig.spec.script = answer
        for path in ("/v1/models/x-1", "/v1/models/x-2", "/invented-1", "/invented-2"):
            await rig.http.get(path)
        await rig.http.post(CHAT, json={"model": "invented"}, headers={"x-request-id": "invented"})
        await rig.record(5)
        endpoints = {record.endpoint for record in rig.observer.records}
        assert not any("invented" in name or "x-" in name for name in endpoints)
        assert len(endpoints) == 3
