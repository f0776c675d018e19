"""The state file: whole or not at all, and never trusted."""

import json
from pathlib import Path

import pytest

from router.core.calibration import Calibration, ServerProfile, TpotPoint
from router.core.parity import ServerFacts
from router.core.types import Layout, Role
from router.dataplane.state_file import (
    CORRUPT_SUFFIX,
    STATE_BYTES_MAX,
    StateFile,
    combined,
    stamped,
)


def profile(role: Role, name: str | None = None, *seconds: float) -> ServerProfile:
    points = tuple(TpotPoint(n + 1.0, s, s, s) for n, s in enumerate(seconds))
    return ServerProfile(role, name, tpot=points)


STATE = Calibration((profile(Role.SPEC, "spec", 0.01, 0.02),), "m", Layout.DISJOINT)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.warnings: list[str] = []
        self.path = folder / "state.json"
        self.file = StateFile(self.path, self.warnings.append)

    def load(self, layout: Layout = Layout.DISJOINT) -> Calibration | None:
        return self.file.load(layout)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_what_is_saved_is_loaded(rig: Rig) -> None:
    assert rig.file.save(STATE)
    assert rig.load() == STATE
    assert rig.warnings == []
    assert list(rig.path.parent.iterdir()) == [rig.path]


def test_no_file_is_no_state_and_no_warning(rig: Rig) -> None:
    assert rig.load() is None
    assert rig.warnings == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b'{"schema": 1, "servers": [{"ro', "not JSON"),
        (b'{"schema": 9, "servers": []}', "schema is 9, expected 1"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b" " * (STATE_BYTES_MAX + 1), "more than"),
    ],
)
def test_a_corrupt_file_is_set_aside_with_a_warning(rig: Rig, content: bytes, said: str) -> None:
    rig.path.write_bytes(content)
    assert rig.load() is None
    assert not rig.path.exists()
    assert rig.path.with_name(rig.path.name + CORRUPT_SUFFIX).read_bytes() == content
    (warning,) = rig.warnings
    assert said in warning
    assert "starting fresh" in warning
    assert rig.file.save(STATE)
    assert rig.load() == STATE


def test_a_file_of_another_layout_is_refused_and_kept(rig: Rig) -> None:
    rig.file.save(STATE)
    assert rig.load(Layout.SHARED) is None
    (warning,) = rig.warnings
    assert "layout is disjoint, but the servers are shared" in warning
    assert rig.path.exists()


def test_a_file_that_cannot_be_read_or_written_is_a_warning(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.path.mkdir()
    assert rig.load() is None
    assert not rig.file.save(STATE)
    assert "cannot be read" in rig.warnings[0]
    assert "cannot be written" in rig.warnings[1]
    assert list(tmp_path.iterdir()) == [rig.path]


def test_a_failed_save_leaves_the_old_file(rig: Rig) -> None:
    rig.file.save(STATE)
    before = rig.path.read_bytes()
    (rig.path.parent / "sub").mkdir()
    broken = StateFile(rig.path.parent / "no" / "state.json", rig.warnings.append)
    assert not broken.save(STATE)
    assert rig.path.read_bytes() == before
    json.loads(before)


def test_the_state_wins_where_it_knows_the_server() -> None:
    given = Calibration((profile(Role.SPEC, None, 0.5), profile(Role.BASE, None, 0.3)), "m")
    both = combined(STATE, given)
    assert both is not None
    assert both.profile("spec", Role.SPEC) == STATE.servers[0]
    assert both.profile("base", Role.BASE) == given.servers[1]


def test_a_server_of_which_the_state_knows_nothing_is_the_calibrations() -> None:
    empty = Calibration((profile(Role.SPEC, "spec"),), None, Layout.DISJOINT)
    given = Calibration((profile(Role.SPEC, None, 0.5),), "m")
    both = combined(empty, given)
    assert both is not None
    assert both.profile("spec", Role.SPEC) == given.servers[0]
    assert (combined(None, given), combined(STATE, None)) == (given, STATE)


def test_a_state_carries_the_model_and_versions_it_holds_for() -> None:
    facts = {"spec": ServerFacts("spec", served_model_name="m-2", version="0.5")}
    stamp = stamped(STATE, Layout.SHARED, facts.get)
    assert (stamp.model, stamp.servers[0].engine_version) == ("m-2", "0.5")
    assert stamp.layout is Layout.SHARED
    assert stamped(STATE, Layout.DISJOINT, lambda _: None) == STATE
