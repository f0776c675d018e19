"""What feeds the learner, what it forgets, and when it is saved. Time is the test's."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from router.core.calibration import Calibration, Interference, ServerProfile, TpotPoint
from router.core.health import HealthState, ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.parity import ServerFacts
from router.core.policy import make_policy
from router.core.steering import Steering
from router.core.tokens import TokenModel
from router.core.types import Layout, RequestShape, Role, ServerSpec
from router.dataplane.learning import LAYOUT_S, OBSERVE_S, SAVE_S, Learning, Memory
from router.dataplane.state_file import StateFile

SERVERS = (
    ServerSpec("spec", Role.SPEC, "http://h:1"),
    ServerSpec("base", Role.BASE, "http://h:2"),
)
POINT = TpotPoint(4.0, 0.01, 0.009, 0.011)
FACTS = ServerFacts("spec", served_model_name="m", version="1")


def known(model: str | None = "m", version: str | None = "1") -> Calibration:
    servers = (ServerProfile(Role.SPEC, None, version, tpot=(POINT,)),)
    return Calibration(servers, model, Layout.DISJOINT)


class Sharing(Learner):
    """A learner that has come to believe in a slowdown."""

    believed = Interference(1.9, 1.7, 2.1)

    def interference(self) -> Interference:
        return self.believed

    @property
    def layout(self) -> Layout:
        return Layout.SHARED if self.believed.low > 1 else Layout.DISJOINT


class Rig:
    def __init__(
        self,
        path: Path | None = None,
        calibration: Calibration | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        self.now = 0.0
        self.warnings: list[str] = []
        file = None if path is None else StateFile(path, self.warnings.append)
        memory = Memory(Layout.DISJOINT, calibration, "cal.json", file)
        self.learner = learner(SERVERS, calibration=memory.known)
        self.ledger = Ledger(SERVERS)
        health = {server.name: ServerHealth(state=HealthState.UP) for server in SERVERS}
        policy = make_policy("marginal", learner=self.learner)
        self.tokens = {server.name: TokenModel() for server in SERVERS}
        self.facts: dict[str, ServerFacts] = {}
        self.learning = Learning(
            Steering(SERVERS, policy, self.ledger, health, learner=self.learner),
            self.learner,
            memory,
            SERVERS,
            self.tokens,
            self.facts.get,
            lambda: self.now,
        )

    def serve(self, name: str, seconds: float, tokens_per_s: float) -> None:
        """Let a server answer one request for so long."""
        lease = self.ledger.acquire(name, RequestShape(), self.now)
        counter = self.tokens[name].counter()
        lease.first_token(self.now)
        sent = 0.0
        for _ in range(round(seconds / OBSERVE_S)):
            self.now += OBSERVE_S
            sent += OBSERVE_S * tokens_per_s
            counter.feed(b'data: {"usage":{"completion_tokens":%d}}\n\n' % sent)
            self.learning.look(self.now)


def test_a_stream_under_way_teaches_its_servers_speed() -> None:
    rig = Rig()
    rig.serve("base", 10.0, 100.0)
    estimate = rig.learner.tpot_s("base", 1)
    assert estimate is not None
    assert estimate.value == pytest.approx(0.01, rel=0.05)
    assert rig.learner.tpot_s("spec", 1) is None


def test_a_calibration_is_what_it_starts_from() -> None:
    estimate = Rig(calibration=known()).learner.tpot_s("spec", 4)
    assert estimate is not None
    assert estimate.value == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(FACTS, version="2"), "engine_version is '1', but spec runs '2'"),
        (replace(FACTS, served_model_name="n"), "model is 'm', but spec runs 'n'"),
    ],
)
def test_what_is_of_another_model_or_engine_is_refused(
    facts: ServerFacts, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(calibration=known())
    rig.facts["spec"] = facts
    rig.learning.look(1.0)
    rig.learning.look(2.0)
    assert rig.learner.tpot_s("spec", 4) is None
    (record,) = caplog.records
    assert f"calibration cal.json: {said}" in record.message


def test_what_fits_or_cannot_be_told_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    for facts in (FACTS, ServerFacts("spec")):
        rig = Rig(calibration=known())
        rig.facts["spec"] = facts
        rig.learning.look(1.0)
        assert rig.learner.tpot_s("spec", 4) is not None
    assert caplog.records == []


def test_a_server_that_comes_back_as_another_is_learnt_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(calibration=known())
    rig.facts["spec"] = FACTS
    rig.learning.look(1.0)
    rig.facts["spec"] = replace(FACTS)  # it restarted as it was
    rig.learning.look(2.0)
    assert rig.learner.tpot_s("spec", 4) is not None
    rig.facts["spec"] = replace(FACTS, version="2")
    rig.learning.look(3.0)
    assert rig.learner.tpot_s("spec", 4) is None
    assert "server spec runs something else now" in caplog.text


@pytest.mark.anyio
async def test_what_is_learnt_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = Rig(path)
    first.facts["base"] = replace(FACTS, name="base")
    first.serve("base", 10.0, 100.0)
    assert not path.exists()
    await first.learning.aclose()
    second = Rig(path)
    estimate = second.learner.tpot_s("base", 1)
    assert estimate is not None
    assert estimate.value == pytest.approx(0.01, rel=0.05)
    second.facts["base"] = ServerFacts("base", served_model_name="m", version="2")
    second.learning.look(1.0)
    assert second.learner.tpot_s("base", 1) is None


@pytest.mark.anyio
async def test_it_is_saved_every_minute_and_not_while_nothing_is_known(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    rig = Rig(path)
    await rig.learning.save()
    assert not path.exists()
    rig.serve("base", 10.0, 100.0)
    assert not rig.learning.save_due()
    rig.now += SAVE_S
    assert rig.learning.save_due()
    rig.learning.start()
    async with asyncio.timeout(10):
        while not path.exists():  # noqa: ASYNC110  (a file has no event)
            await asyncio.sleep(0.005)
    assert not rig.learning.save_due()
    await rig.learning.aclose()


def test_a_disjoint_pair_that_behaves_as_shared_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    rig = Rig(learner=Sharing)
    rig.learning.look(LAYOUT_S)
    rig.learning.look(2 * LAYOUT_S)
    assert rig.learning.layout_warning is not None
    assert "1.9 times as long" in rig.learning.layout_warning
    assert [record.message for record in caplog.records] == [rig.learning.layout_warning]
    assert isinstance(rig.learner, Sharing)
    rig.learner.believed = Interference(1.1, 0.9, 1.3)
    rig.learning.look(3 * LAYOUT_S)
    assert rig.learning.layout_warning is None
