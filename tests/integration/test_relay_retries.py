"""A second server: when it is tried, and when never."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from router.core.admission import Limits, Room
from router.core.retry_budget import FLOOR
from router.settings import Admission, Timeouts
from tests.integration.rig import (
    ADMIN_KEY,
    CHAT,
    DONE,
    STREAM,
    Call,
    Engine,
    event,
    running,
    until,
    until_set,
)

pytestmark = pytest.mark.anyio

FULL = {"error": {"object": "error", "message": "The request queue is full.", "code": 503}}
FULL_EVENT = b"data: " + json.dumps(FULL).encode() + b"\n\n"

Script = Callable[[Call], Awaitable[None]]


def refusing(status: int, *lines: str) -> Script:
    async def script(call: Call) -> None:
        await call.reply(b'{"object":"error","who":"%d"}' % status, status, *lines)

    return script


async def full_in_band(call: Call) -> None:
    await call.stream(FULL_EVENT, DONE)


async def streaming(call: Call) -> None:
    await call.stream(event("a"), DONE)


@pytest.mark.parametrize("script", [refusing(503), refusing(429), full_in_band])
async def test_a_refused_request_goes_to_the_other_server_once(script: Script) -> None:
    async with running() as rig:
        rig.spec.script, rig.base.script = script, streaming
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.content) == (200, event("a") + DONE)
        assert response.headers["x-crossover-server"] == "base"
        assert "x-should-retry" not in response.headers
        record = await rig.record()
        assert (record.attempts, record.retry, record.outcome) == (2, "overload", "ok")
        await rig.settled()


async def test_a_retry_sends_the_same_body_under_another_id() -> None:
    """Bug 8: a retried request that runs twice, or that cannot be told from its first attempt."""
    async with running() as rig:
        rig.spec.script = refusing(503)
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        (first,), (second,) = rig.spec.calls, rig.base.calls
        assert first.json.pop("rid") != second.json.pop("rid")
        bodies = [{k: v for k, v in call.json.items() if k != "rid"} for call in (first, second)]
        assert bodies == [json.loads(STREAM)] * 2


@pytest.mark.parametrize("first", [refusing(503), full_in_band])
async def test_two_refusals_are_the_second_engines_own_error_and_not_to_be_retried(
    first: Script,
) -> None:
    """Bug 9: retries that multiply."""
    async with running() as rig:
        rig.spec.script, rig.base.script = first, refusing(429, "retry-after: 7")
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.json()["who"]) == (429, "429")
        assert response.headers["retry-after"] == "7"
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-crossover-server"] == "base"
        assert (len(rig.spec.calls), len(rig.base.calls)) == (1, 1)
        assert (await rig.record()).outcome == "upstream_overload"


async def test_a_second_servers_other_error_says_not_to_retry_either() -> None:
    async with running() as rig:
        rig.spec.script, rig.base.script = refusing(503), refusing(500)
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")


async def test_without_another_server_the_engines_error_passes_as_it_was() -> None:
    lone = {"spec": Engine(refusing(503, "x-engine: spec", "retry-after: 9"))}
    async with running(engines=lone) as rig:
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.json()["who"]) == (503, "503")
        assert response.headers["x-engine"] == "spec"
        assert response.headers["retry-after"] == "9"
        assert "x-should-retry" not in response.headers
        assert "x-crossover-error" not in response.headers
        record = await rig.record()
        assert (record.attempts, record.retry, record.status) == (1, None, 503)


async def test_a_refusal_outlives_a_second_server_that_is_not_there() -> None:
    async with running() as rig:
        rig.spec.script = refusing(503)
        await rig.base.stop()
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.json()["who"]) == (503, "503")
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-crossover-server"] == "spec"
        record = await rig.record()
        assert (record.server, record.outcome) == ("spec", "upstream_overload")
        assert record.attempts == 2
        await rig.settled()


@pytest.mark.parametrize("status", [400, 404, 500, 502, 504])
async def test_what_may_have_run_is_never_sent_again(status: int) -> None:
    async with running() as rig:
        rig.spec.script = refusing(status)
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.json()["who"]) == (status, str(status))
        assert not rig.base.calls


async def test_a_connection_that_breaks_under_a_request_is_no_reason_to_send_it_again() -> None:
    async def script(call: Call) -> None:
        call.reset()

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.headers["x-crossover-error"] == "upstream_broken"
        assert not rig.base.calls


async def test_a_refusal_after_the_first_event_is_the_clients_to_see() -> None:
    async def script(call: Call) -> None:
        await call.stream(event("a"), FULL_EVENT, DONE)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.content == event("a") + FULL_EVENT + DONE
        assert not rig.base.calls


async def test_a_refusal_too_long_to_keep_passes_at_once() -> None:
    body = b"x" * 200_000

    async def script(call: Call) -> None:
        await call.reply(body, 503)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.content) == (503, body)
        assert not rig.base.calls
        assert (await rig.record()).outcome == "upstream_overload"


async def test_a_refusal_that_stands_still_is_given_up() -> None:
    async def script(call: Call) -> None:
        await call.head(503, "content-length: 10")
        await call.write(b"12345")
        await call.gone()

    timeouts = Timeouts(connect_s=1.0, first_byte_s=30.0, idle_s=0.2)
    async with running(timeouts=timeouts) as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=STREAM)
        assert response.headers["x-crossover-error"] == "idle_timeout"
        await rig.settled()


async def test_retries_of_refusals_have_a_budget() -> None:
    async with running(admission=Admission(retry_share=0.01)) as rig:
        rig.spec.script = refusing(503)
        statuses = [(await rig.http.post(CHAT, content=STREAM)).status_code for _ in range(8)]
        assert statuses == [200] * FLOOR + [503] * (8 - FLOOR)
        assert rig.relay.gate.retries_denied == 8 - FLOOR


async def test_without_a_budget_nothing_that_was_refused_is_sent_again() -> None:
    async with running(admission=Admission(retry_share=0.0)) as rig:
        rig.spec.script = refusing(503)
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 503


async def test_a_connection_that_failed_needs_no_budget() -> None:
    async with running(admission=Admission(retry_share=0.0)) as rig:
        rig.health["spec"].transport_errors_max = 10**6
        await rig.spec.stop()
        for _ in range(10):
            assert (await rig.http.post(CHAT, content=STREAM)).status_code == 200
        assert all(record.retry == "connect" for record in rig.observer.records)


async def test_a_request_is_sent_twice_at_most_however_many_servers_there_are() -> None:
    engines = {name: Engine(refusing(503)) for name in ("spec-1", "spec-2", "base-1", "base-2")}
    async with running(engines=engines) as rig:
        assert (await rig.http.post(CHAT, content=STREAM)).status_code == 503
        assert sum(len(engine.calls) for engine in engines.values()) == 2


async def test_a_control_request_is_never_sent_to_another_server() -> None:
    """It was meant for the server that it named."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "x-crossover-target": "spec"}
    async with running() as rig:
        rig.spec.script = refusing(503)
        response = await rig.http.post("/flush_cache", headers=headers)
        assert response.status_code == 503
        await rig.spec.stop()
        response = await rig.http.post("/flush_cache", headers=headers)
        assert response.headers["x-crossover-error"] == "upstream_unreachable"
        assert not rig.base.calls


async def test_a_client_that_leaves_between_two_attempts_ends_both() -> None:
    async def script(call: Call) -> None:
        await call.gone()

    async with running() as rig:
        rig.spec.script, rig.base.script = refusing(503), script
        _, writer = await rig.post(CHAT, STREAM)
        await until(lambda: rig.base.calls)
        writer.transport.abort()
        record = await rig.record()
        assert (record.outcome, record.attempts) == ("client_disconnect", 2)
        await until(lambda: len(rig.base.aborts) == 1)
        assert not rig.spec.aborts
        await rig.settled()


async def test_a_refused_request_waits_for_room_on_the_other_server() -> None:
    held = asyncio.Event()
    admission = Admission(Limits(of={"base": Room(sequences=1)}))
    async with running(admission=admission, policy="least-inflight") as rig:
        rig.spec.script, rig.base.script = refusing(503), until_set(held)
        first = asyncio.ensure_future(rig.http.post(CHAT, content=STREAM))
        await until(lambda: rig.base.calls)
        second = asyncio.ensure_future(rig.http.post(CHAT, content=STREAM))
        await until(lambda: len(rig.relay.gate.line) == 1)
        held.set()
        assert (await first).status_code == (await second).status_code == 200
        record = await rig.record(2)
        assert (record.retry, record.waited, record.server) == ("overload", "served", "base")
        await rig.settled()


async def test_a_retry_that_waits_in_vain_ends_with_the_engines_own_error() -> None:
    async def script(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    admission = Admission(Limits(of={"base": Room(sequences=1)}), queue_timeout_s=0.1)
    async with running(admission=admission) as rig:
        rig.spec.script, rig.base.script = refusing(503), script
        reader, writer = await rig.post(CHAT, STREAM)
        await reader.readuntil(b"\n\n")
        response = await rig.http.post(CHAT, content=STREAM)
        assert (response.status_code, response.json()["who"]) == (503, "503")
        assert (await rig.record()).waited == "timeout"
        writer.close()
        await rig.settled()
