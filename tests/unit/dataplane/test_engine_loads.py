"""What engines say of their load, asked over real sockets, and how little of it is believed."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.core.health import HealthState, ServerHealth
from router.core.types import EngineReport, Role, ServerSpec, SwitchReport
from router.dataplane.engine_loads import ABSENT_S, AGE_S_MAX, LoadPoller, read_loads

pytestmark = pytest.mark.anyio

DEADLINE_S = 10.0
SWITCH = {
    "state": "active", "mode": "off", "threshold": 8, "enable_threshold": 6, "off_share": 0.25,
    "reason": None, "steps": {"on": 1, "off": 3},
}  # fmt: skip
RANK = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "spec_switch": SWITCH}
REPORT = EngineReport(running=3, queued=1, switch=SwitchReport("active", "off", 8, 6, 0.25))


def loads(*ranks: object) -> dict[str, Any]:
    return {"loads": list(ranks)}


def test_what_an_engine_tells_is_taken() -> None:
    told = read_loads(loads(RANK), 7.0)
    assert (told.report, told.token_usage, told.at) == (REPORT, 0.5, 7.0)


def test_ranks_add_up_and_the_fullest_cache_counts() -> None:
    told = read_loads(loads(RANK, RANK | {"token_usage": 0.75}), 0.0)
    assert (told.report.running, told.report.queued, told.token_usage) == (6, 2, 0.75)
    assert told.report.switch == REPORT.switch


@pytest.mark.parametrize("key", ["num_running_reqs", "num_waiting_reqs"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None, 10**9])
def test_a_count_that_cannot_be_is_not_told(key: str, value: object) -> None:
    report = read_loads(loads(RANK, RANK | {key: value}), 0.0).report
    counts = {"num_running_reqs": report.running, "num_waiting_reqs": report.queued}
    assert counts.pop(key) is None
    assert counts.popitem()[1] is not None


@pytest.mark.parametrize("value", [-0.1, 1.1, True, "0", None, math.nan, math.inf])
def test_a_share_that_cannot_be_is_not_told(value: object) -> None:
    told = read_loads(loads(RANK | {"token_usage": value}), 0.0)
    assert told.token_usage is None
    switch = read_loads(loads(RANK | {"spec_switch": SWITCH | {"off_share": value}}), 0.0)
    assert switch.report.switch is not None
    assert switch.report.switch.off_share is None


@pytest.mark.parametrize(
    "switch",
    [None, [], "active", SWITCH | {"state": "asleep"}, SWITCH | {"mode": 1}, SWITCH | {"mode": []}],
)
def test_a_switch_that_makes_no_sense_is_none(switch: object) -> None:
    assert read_loads(loads(RANK | {"spec_switch": switch}), 0.0).report.switch is None


def test_a_switch_that_only_some_ranks_have_is_none() -> None:
    assert read_loads(loads(RANK, RANK | {"spec_switch": None}), 0.0).report.switch is None


@pytest.mark.parametrize("answer", [{}, {"loads": 3}, loads(), loads(1), loads(RANK, "x")])
def test_an_answer_of_another_shape_tells_nothing(answer: dict[str, Any]) -> None:
    told = read_loads(answer, 0.0)
    assert (told.report, told.token_usage) == (EngineReport(), None)


class Rig:
    """One server on a real socket, its poller, and what the poller has passed on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.status, self.body = 200, json.dumps(loads(RANK)).encode()
        self.asked = 0
        self.reports: list[EngineReport] = []
        self.health = ServerHealth(state=HealthState.UP)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        length = len(self.body)
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, length))
        writer.write(self.body)
        writer.close()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  (the poller has no event)
                await asyncio.sleep(0.005)

    async def asked_again(self) -> None:
        """Wait until an answer that is given from now on has been taken."""
        asked = self.asked
        await self.until(lambda: self.asked >= asked + 2)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LoadPoller]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = ServerSpec("s", Role.SPEC, f"http://127.0.0.1:{port}")

        def reported(name: str, now: float, report: EngineReport) -> None:
            assert (name, now) == ("s", self.now)
            self.reports.append(report)

        poller = LoadPoller(
            [spec], {"s": self.health}, reported, clock=lambda: self.now, poll_s=0.01
        )
        poller.start()
        try:
            yield poller
        finally:
            await poller.aclose()
            server.close()
            await server.wait_closed()


async def test_a_server_that_is_up_is_asked_and_its_report_passed_on() -> None:
    rig = Rig()
    async with rig.running() as poller:
        await rig.until(lambda: rig.reports)
        told = poller.told("s")
    assert rig.reports[0] == REPORT
    assert told is not None
    assert told.report == REPORT


async def test_a_report_that_is_too_old_is_forgotten_and_the_core_told_so() -> None:
    rig = Rig()
    async with rig.running() as poller:
        await rig.until(lambda: rig.reports)
        rig.status = 503
        await rig.asked_again()
        assert poller.told("s") is not None
        rig.now = AGE_S_MAX + 1
        assert poller.told("s") is None
        await rig.until(lambda: rig.reports[-1] == EngineReport())
        rig.reports.clear()
        await rig.asked_again()
        assert rig.reports == []


async def test_a_server_that_is_down_is_not_asked() -> None:
    rig = Rig()
    async with rig.running():
        await rig.until(lambda: rig.reports)
        rig.health.state = HealthState.UNREACHABLE
        # The last question may still be out; it is answered before the next would be.
        await rig.until(lambda: rig.asked == len(rig.reports))
        asked = rig.asked
        rig.now = AGE_S_MAX + 1
        await rig.until(lambda: rig.reports[-1] == EngineReport())
        assert rig.asked == asked


async def test_a_server_without_such_a_path_is_asked_seldom() -> None:
    rig = Rig()
    rig.status = 404

    def later(times: int) -> bool:
        rig.now += ABSENT_S / 8
        return rig.asked == times

    async with rig.running():
        for times in (1, 2, 3):
            await rig.until(lambda times=times: later(times))  # type: ignore[misc]
            assert rig.asked <= 1 + rig.now / ABSENT_S
        rig.status = 200
        await rig.until(lambda: later(0) or rig.reports)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"loads": "x"}', b"[" * 100_000])
async def test_nonsense_ends_nothing(body: bytes) -> None:
    rig = Rig()
    rig.body = body
    async with rig.running():
        await rig.asked_again()
        rig.body = json.dumps(loads(RANK)).encode()
        await rig.until(lambda: REPORT in rig.reports)
