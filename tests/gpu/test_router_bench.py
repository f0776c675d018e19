"""The picture from rows, and the load that a step and a steady level put on a server."""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.sim_server import MODEL_NAME
from loadtest.workload import Lognormal
from tests.gpu import picture
from tests.gpu.picture import phase_tokens
from tests.gpu.processes import ROOT, Process, free_port
from tests.gpu.router_process import Router
from tests.gpu.streams import STRAGGLER, Aim, Mixed, Renewed, Step, steady, step

CURVES = {
    picture.SPEC: {1: 200.0, 8: 1500.0, 32: 3000.0},
    picture.BASE: {1: 150.0, 8: 1500.0, 32: 5000.0},
}


def steady_row(arm: str, level: int, tok_s: float) -> dict:
    return {
        "kind": "steady",
        "stage": 1,
        "round": 0,
        "arm": arm,
        "level": level,
        "tok_s": tok_s,
        "ttft_ms": {"p50": 9.0},
        "itl_ms": {"p50": 5.0},
        "cpu": {"client": 0.2},
    }


def both_alone() -> list[dict]:
    return [steady_row(arm, n, tok_s) for arm, at in CURVES.items() for n, tok_s in at.items()]


def step_row(tok_s: list[float], in_flight: list[float]) -> dict:
    return {
        "kind": "step",
        "stage": 1,
        "round": 0,
        "arm": picture.ROUTED,
        "wall_s": 4.0,
        "at_s": [0.5, 1.5, 2.5, 3.5],
        "timeline_tok_s": tok_s,
        "in_flight": {"spec": in_flight},
        "phases": [(1, 1), (1, 32), (1, 1)],
        "tokens": 10,
        "switches": 2,
        "straggler": None,
    }


@pytest.mark.parametrize(
    ("ahead", "load", "up_to"),
    [("spec", 22.6, 22), ("spec", None, 64), ("base", None, 0), ("base", 5.0, 0)],
)
def test_the_threshold_is_where_the_curves_cross(
    ahead: str, load: float | None, up_to: int
) -> None:
    assert picture.threshold({"ahead": ahead, "load": load}, (1, 8, 64)) == up_to


@pytest.mark.parametrize(("load", "tok_s"), [(0, 0), (0.5, 100), (1, 200), (20, 2250), (99, 3000)])
def test_a_rate_lies_on_straight_lines_between_levels(load: float, tok_s: float) -> None:
    assert picture.rate(CURVES[picture.SPEC], load) == pytest.approx(tok_s)


def test_a_step_that_does_what_the_better_server_would_loses_nothing() -> None:
    row = step_row([200, 5000, 5000, 200], [1, 32, 32, 1])
    found = picture.loss(row, CURVES[picture.SPEC], CURVES[picture.BASE])
    assert (found.tokens, found.seconds, found.share) == pytest.approx((0, 0, 0))


def test_a_step_on_the_slower_server_loses_what_the_other_would_have_made() -> None:
    row = step_row([200, 3000, 3000, 200], [1, 32, 32, 1])
    found = picture.loss(row, CURVES[picture.SPEC], CURVES[picture.BASE])
    assert found.tokens == pytest.approx(2 * 2000)
    assert found.seconds == pytest.approx(2 * 0.4)
    assert found.share == pytest.approx(4000 / 10_400)


def test_tokens_after_the_last_phase_are_the_drains() -> None:
    assert picture.phase_tokens(step_row([1, 2, 3, 4], [1, 1, 1, 1])) == [1, 2, 3, 4]


def test_routed_is_held_against_the_better_server_of_its_level() -> None:
    rows = both_alone()
    rows += [steady_row(picture.ROUTED, 1, 198.0), steady_row(picture.ROUTED, 32, 4800.0)]
    low, high = picture.judge(rows)
    assert (low["reference"], low["ratio"], low["met"]) == (picture.SPEC, 0.99, True)
    assert (high["reference"], high["ratio"], high["met"]) == (picture.BASE, 0.96, False)


def test_the_report_stands_without_a_step_and_without_a_router() -> None:
    assert "1500" in picture.report(both_alone())
    assert picture.report([*both_alone(), step_row([1, 2, 3, 4], [1, 1, 1, 1])])


def test_the_first_requests_of_a_level_are_rests_and_the_others_whole() -> None:
    lengths = Renewed(64, 256, 200)
    first = [lengths.draw(index, random.Random(index))[1] for index in range(64)]
    assert len(set(first)) > 30
    assert min(first) >= 1
    assert max(first) <= 200
    assert lengths.draw(64, random.Random(0)) == (256, 200)


def test_a_step_keeps_each_level_for_its_time() -> None:
    lengths = Mixed(16, Lognormal(20, 0.5, 80), 2000)
    loop = Step(((5, 1), (12, 64), (6, 1)), lengths).pacer()
    assert [loop.ramp.level(at) for at in (0, 4.9, 5, 16.9, 17, 22)] == [1, 1, 64, 64, 1, 1]
    assert loop.duration_s == 23
    drawn = [lengths.draw(index, random.Random(index))[1] for index in range(4)]
    assert [tokens == 2000 for tokens in drawn] == [index == STRAGGLER for index in range(4)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Process]:
    port = free_port()
    command = ["-m", "loadtest", "engine", f"spec=h200-plain:{port}"]
    log = tmp_path / "log.txt"
    made = Process("engine", command, os.environ, log, port=port, folder=ROOT, ready_path="/health")
    try:
        made.wait_up(time.monotonic() + 30)
        yield made
    finally:
        made.stop()


def test_a_steady_level_is_measured_while_requests_end_one_by_one(engine: Process) -> None:
    aim = Aim(picture.BASE, engine.url, MODEL_NAME, {"base": engine})
    row = steady(aim, Renewed(4, 16, 64), settle_s=0.3, window_s=0.7, seed=1)
    assert row["errors"] == 0
    assert row["tok_s"] > 0
    assert row["in_flight"] == {picture.BASE: pytest.approx(4, abs=0.5)}
    assert row["cpu"].keys() == {"client", "base"}
    json.dumps(row)


def test_a_step_is_run_to_its_last_answer(engine: Process) -> None:
    aim = Aim(picture.BASE, engine.url, MODEL_NAME, {})
    plan = Step(((0.3, 1), (0.5, 4), (0.2, 1)), Mixed(16, Lognormal(20, 0.5, 80), 300))
    row = step(aim, plan, limit_s=30, seed=1, look=lambda: {"seen": 1})
    assert row["errors"] == 0
    assert row["cut"] == 0
    assert row["straggler"]["tokens"] == 300
    assert sum(phase_tokens(row | {"kind": "step"})) == pytest.approx(row["tokens"], rel=0.05)
    assert row["samples"][0]["seen"] == 1
    json.dumps(row)


def test_the_router_is_asked_as_a_server_is(engine: Process, tmp_path: Path) -> None:
    arguments = ["--layout", "shared", "--policy", "spec-only"]
    router = Router({"spec": engine}, arguments, None, tmp_path / "router.txt")
    try:
        router.wait_up(time.monotonic() + 30)
        aim = Aim(picture.ROUTED, router.url, MODEL_NAME, {"router": router})
        row = steady(aim, Renewed(2, 16, 32), settle_s=0.2, window_s=0.4, seed=1)
        mode = router.get("/crossover/state")["policy"]["mode"]
    finally:
        router.stop()
    assert row["errors"] == 0
    assert row["in_flight"]["spec"] > 1
    assert row["cpu"]["router"] is not None
    assert mode == "spec"
