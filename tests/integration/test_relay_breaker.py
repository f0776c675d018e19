"""A server that answers badly: when it is left alone, and how it comes back."""

import logging

import pytest

from router.core.breaker import BreakerState
from router.settings import Admission
from tests.integration.rig import (
    CHAT,
    DONE,
    STREAM,
    Call,
    Engine,
    Rig,
    Script,
    event,
    running,
    until,
)

pytestmark = pytest.mark.anyio

TWO = Admission(breaker_failures=2)


async def failing(call: Call) -> None:
    await call.reply(b'{"object":"error"}', 500)


async def breaking(call: Call) -> None:
    call.reset()


async def breaking_off(call: Call) -> None:
    await call.stream_head()
    await call.chunk(event("a"))
    call.reset()


async def ending_early(call: Call) -> None:
    await call.stream(event("a"))


async def garbage(call: Call) -> None:
    await call.write(b"what?\r\n\r\n")
    call.reset()


async def failing_in_band(call: Call) -> None:
    await call.stream(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', DONE)


async def streaming(call: Call) -> None:
    await call.stream(event("a"), DONE)


async def ask(rig: Rig, count: int) -> list[str]:
    """Send so many requests, one after the other; return the servers that they went to."""
    servers = []
    for _ in range(count):
        reader, writer = await rig.post(CHAT, STREAM, "connection: close")
        head = (await reader.read()).decode().partition("\r\n\r\n")[0]
        writer.close()
        servers.append(head.split("x-crossover-server: ")[1].split("\r")[0])
    return servers


def state(rig: Rig, server: str = "spec") -> BreakerState:
    return rig.health[server].breaker.state


async def half_opened(rig: Rig, script: Script) -> None:
    """Let `spec` fail until its breaker opens, wait for no time until its trial, then go on."""
    rig.health["spec"].breaker.open_s = 0.0
    rig.spec.script = failing
    await ask(rig, 2)
    rig.spec.script = script
    await until(lambda: state(rig) is BreakerState.HALF_OPEN)


@pytest.mark.parametrize(
    "script", [failing, breaking, breaking_off, ending_early, garbage, failing_in_band]
)
async def test_a_server_that_fails_in_a_row_is_left_alone(
    script: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(admission=TWO) as rig:
        rig.spec.script = script  # type: ignore[assignment]
        assert await ask(rig, 4) == ["spec", "spec", "base", "base"]
        assert state(rig) is BreakerState.OPEN
        assert rig.health["spec"].up
        told = [line for line in caplog.messages if line.startswith("server spec: breaker open")]
        assert len(told) == 1
        assert "None" not in told[0]
        await rig.settled()


@pytest.mark.parametrize("status", [400, 404, 422, 429, 499, 501, 503])
async def test_overload_and_what_a_client_did_wrong_open_no_breaker(status: int) -> None:
    """Bug 23: one bad client, or a busy server, and all load moves to the other."""

    async def script(call: Call) -> None:
        await call.reply(b'{"object":"error"}', status)

    async with running(admission=Admission(breaker_failures=1, retry_share=0.0)) as rig:
        rig.spec.script = script
        assert await ask(rig, 3) == ["spec"] * 3
        assert state(rig) is BreakerState.CLOSED


async def test_clients_that_leave_open_no_breaker() -> None:
    async def script(call: Call) -> None:
        await call.gone()

    async with running(admission=Admission(breaker_failures=1)) as rig:
        rig.spec.script = script
        for count in range(1, 4):
            _, writer = await rig.post(CHAT, STREAM)
            await until(lambda count=count: len(rig.spec.calls) == count)  # type: ignore[misc]
            writer.transport.abort()
            await rig.record(count)
        assert state(rig) is BreakerState.CLOSED


async def test_answers_between_failures_keep_it_closed() -> None:
    scripts = [failing, streaming] * 3

    async def script(call: Call) -> None:
        await scripts[len(rig.spec.calls) - 1](call)

    async with running(admission=TWO) as rig:
        rig.spec.script = script
        assert await ask(rig, 6) == ["spec"] * 6


async def test_a_list_of_models_says_nothing_of_an_engine() -> None:
    async with running(admission=TWO) as rig:
        rig.spec.script = failing
        await ask(rig, 1)
        rig.spec.script = streaming
        assert (await rig.http.get("/v1/models")).status_code == 200
        rig.spec.script = failing
        await ask(rig, 1)
        assert state(rig) is BreakerState.OPEN


async def test_the_last_server_is_never_taken_out_by_its_breaker() -> None:
    """Two broken answers used to take even the last server out for a second."""
    async with running(engines={"spec": Engine(breaking)}, admission=TWO) as rig:
        assert await ask(rig, 5) == ["spec"] * 5
        assert state(rig) is BreakerState.OPEN
        rig.spec.script = streaming
        assert (await rig.http.post(CHAT, content=STREAM)).content == event("a") + DONE


async def test_both_failing_both_are_used() -> None:
    async with running(admission=TWO, policy="least-inflight") as rig:
        rig.spec.script = rig.base.script = failing
        assert set(await ask(rig, 8)) == {"spec", "base"}
        assert (state(rig), state(rig, "base")) == (BreakerState.OPEN, BreakerState.OPEN)


async def test_one_request_tries_it_and_a_good_answer_closes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running(admission=TWO) as rig:
        await half_opened(rig, streaming)
        assert await ask(rig, 2) == ["spec", "spec"]
        assert state(rig) is BreakerState.CLOSED
        assert rig.health["spec"].returned_at is not None
        lines = [line for line in caplog.messages if "breaker" in line]
        assert [line.split("breaker ")[1].split(",")[0].split(" for")[0] for line in lines] == [
            "open",
            "half open",
            "closed",
        ]


async def test_the_first_token_of_the_trial_closes_it_and_only_one_is_tried() -> None:
    async def slow(call: Call) -> None:
        await call.stream_head()
        await until(lambda: rig.base.calls)
        await call.chunk(event("a"))
        await until(lambda: state(rig) is BreakerState.CLOSED)
        await call.chunk(DONE)
        await call.end()

    async with running(admission=TWO) as rig:
        await half_opened(rig, slow)
        reader, writer = await rig.post(CHAT, STREAM)
        await until(lambda: len(rig.spec.calls) == 3)
        assert await ask(rig, 1) == ["base"]
        await reader.readuntil(b"0\r\n\r\n")
        assert await ask(rig, 1) == ["spec"]
        writer.close()


async def test_a_failed_trial_opens_it_again_for_longer() -> None:
    async with running(admission=TWO) as rig:
        breaker = rig.health["spec"].breaker
        breaker.open_s = 0.02
        rig.spec.script = failing
        await ask(rig, 2)
        await until(lambda: state(rig) is BreakerState.HALF_OPEN)
        await ask(rig, 1)
        assert breaker.opened_total == 2
        assert breaker.opened_s == 0.04


async def test_a_trial_whose_client_leaves_is_followed_by_another() -> None:
    async def silent(call: Call) -> None:
        await call.gone()

    async with running(admission=TWO) as rig:
        await half_opened(rig, silent)
        _, writer = await rig.post(CHAT, STREAM)
        await until(lambda: len(rig.spec.calls) == 3)
        writer.transport.abort()
        await rig.record(3)
        rig.spec.script = streaming
        assert await ask(rig, 1) == ["spec"]
        assert state(rig) is BreakerState.CLOSED


async def test_a_server_that_returns_gets_a_few_requests_first() -> None:
    async def endless(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    async with running(admission=Admission(slow_start_s=3600.0)) as rig:
        rig.spec.script = rig.base.script = endless
        rig.health["spec"].returned_at = rig.relay.clock()
        writers = []
        for _ in range(8):
            reader, writer = await rig.post(CHAT, STREAM)
            await reader.readuntil(b"\n\n")
            writers.append(writer)
        assert rig.ledger.load("spec").sequences == 4
        assert rig.ledger.load("base").sequences == 4
        for writer in writers:
            writer.close()
        await rig.settled()
