import asyncio

import pytest

from loadtest.bench import Bench
from loadtest.calibrate import Calibrating, Options, mode_of, text, warnings
from loadtest.calibration_points import plan
from loadtest.server_facts import ServerFacts
from router.core.calibration import Calibration, Interference, ServerProfile, TpotPoint
from router.core.types import Layout, Role

SWITCH = {"state": "active", "threshold": 8}


@pytest.mark.parametrize(
    ("switch", "level", "mode"),
    [
        (SWITCH, 8, "on"),
        (SWITCH, 9, "off"),
        (SWITCH | {"state": "loaded"}, 9, None),
        (SWITCH | {"threshold": None}, 9, None),
        (None, 9, None),
    ],
)
def test_points_of_a_server_that_switches_itself_say_its_mode(
    switch: dict[str, object] | None, level: int, mode: str | None
) -> None:
    facts = ServerFacts(info={} if switch is None else {"spec_switch": switch})
    assert mode_of(facts, level) == mode


def calibrating(layout: Layout) -> Calibrating:
    bench = Bench("m", 8, 8, True, 1, "sk-1", 1.0, 1, None)
    urls = {Role.SPEC: "http://a", Role.BASE: "http://b"}
    options = Options(bench, urls, dict.fromkeys(Role), layout, plan((1, 2), 30.0), "c.json", None)
    facts = {role: ServerFacts() for role in Role}
    return Calibrating(options, 1.0, facts, asyncio.Event(), lambda _: None)


def made(layout: Layout, slowdown: float) -> Calibration:
    servers = tuple(ServerProfile(role) for role in Role)
    known = Interference(slowdown, slowdown, slowdown)
    return Calibration(servers, "m", layout, known)


@pytest.mark.parametrize(
    ("layout", "slowdown", "warned"),
    [(Layout.DISJOINT, 1.9, True), (Layout.DISJOINT, 1.05, False), (Layout.SHARED, 1.9, False)],
)
def test_servers_with_gpus_of_their_own_that_slow_one_another_are_warned_of(
    layout: Layout, slowdown: float, warned: bool
) -> None:
    found = warnings(calibrating(layout), made(layout, slowdown))
    assert any("do they share GPUs?" in said for said in found) is warned


def test_points_with_wide_bounds_are_warned_of() -> None:
    points = (TpotPoint(1.0, 0.010, 0.009, 0.011), TpotPoint(8.0, 0.020, 0.019, 0.030))
    found = Calibration((ServerProfile(Role.BASE, tpot=points),), "m", Layout.SHARED)
    (said,) = warnings(calibrating(Layout.SHARED), found)
    assert "bounds are wide for base at 8 (55%):" in said


def test_a_calibration_that_was_stopped_says_so() -> None:
    found = calibrating(Layout.SHARED)
    found.levels = {role: [] for role in Role}
    found.stop.set()
    said = text(found, made(Layout.SHARED, 1.9))
    assert "stopped before the end" in said
    assert "nothing can be said of a crossover" in said


def test_a_bench_does_not_show_its_key() -> None:
    assert "sk-1" not in repr(calibrating(Layout.SHARED))
