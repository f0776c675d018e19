"""The rule that reckons with step times, in the real engine: by a table that is given, and by its
own measurements.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.harness.cases import FEATURES
from tests.engine.harness.comparing import assert_same_answers
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import (
    CHAIN_V2,
    CHAIN_V2_PAGED,
    CLEAN,
    GOODPUT,
    PLAIN,
    TREE,
    Engine,
    Job,
)
from tests.engine.harness.serving import ServerProcess, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio]

PATIENCE_S = 120.0
CASES = [FEATURES[name] for name in ("burst", "staggered", "stops", "aborts", "chunked")]
DEFERRED = {**GOODPUT, "SGLANG_SPEC_SWITCH_DRAFT_SYNC": "deferred"}
JOBS = {
    "tree": Job(TREE, CASES, GOODPUT),
    "chain": Job(CHAIN_V2, CASES, GOODPUT),
    "chain-paged": Job(CHAIN_V2_PAGED, CASES, GOODPUT),
    "chain-deferred": Job(CHAIN_V2, CASES, DEFERRED),
}


@pytest.mark.parametrize("case", [case.name for case in CASES])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_answers_are_those_of_the_plain_engine(job: Job, case: str, laboratory: Laboratory) -> None:
    result = laboratory.result(job, case)
    assert_same_answers(result, laboratory.result(Job(PLAIN, CASES), case))
    assert result.accounting == CLEAN


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_mode_follows_the_table(job: Job, laboratory: Laboratory) -> None:
    """By it an ON step takes as long as an OFF step up to three requests, and 50 times as long from
    four on.
    """
    result = laboratory.result(job, "burst")
    seen = Counter(zip(result.decided_for, result.modes, strict=True))
    assert seen[1, "on"] > 0
    assert not any(mode == "off" for size, mode in seen if size <= 3)
    assert not any(mode == "on" for size, mode in seen if size >= 4)
    assert seen[10, "off"] > 0
    state = result.internal_state["spec_switch"]
    assert (state["policy"], state["threshold"]) == ("goodput", None)


def test_without_its_hook_nothing_ever_switches(laboratory: Laboratory) -> None:
    """Until step times are known, speculation stays on."""
    hook = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
    result = laboratory.result(
        Job(TREE, [FEATURES["burst"]], GOODPUT, f"void-hook:{hook}"), "burst"
    )
    assert set(result.modes) == {"on"}


@pytest.fixture(params=[TREE.on_two_ranks(), CHAIN_V2], ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param.with_options(
        "goodput",
        speculative_switch_policy="goodput",
        speculative_switch_dwell_steps=4,
        max_queued_requests=4,  # measuring is not bound by it
    )


async def test_a_server_measures_itself_and_its_ranks_agree(
    engine: Engine, models: Path, tmp_path: Path
) -> None:
    trace, cache = tmp_path / "trace", tmp_path / "cache"
    environment = {
        "SGLANG_SPEC_SWITCH_TRACE": str(trace),
        "SGLANG_SPEC_SWITCH_CACHE": str(cache),
    }
    if "tp_size" in engine.options:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    served = start_engine(engine, models, tmp_path, environment)
    try:
        served.wait_until_healthy()
        alone = await texts(served, 1)
        assert await texts(served, 4) == alone * 4
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            load = (await client.get(served.url + "/v1/loads")).json()["loads"][0]
            exported = (await client.get(served.url + "/metrics")).text
    finally:
        served.stop()
    assert "step times measured in" in served.log.read_text()
    check_cache(cache, engine)
    check_state(load["spec_switch"])
    assert "sglang:spec_switch_break_even{" in exported
    assert "sglang:spec_switch_accept_length{" in exported
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    steps: dict[int, list[tuple[int, str, int]]] = {}
    for line in lines:
        steps.setdefault(line["rank"], []).append((line["step"], line["mode"], line["batch"]))
    assert len(steps) == engine.options.get("tp_size", 1)
    assert all(rank == steps[0] for rank in steps.values())
    assert steps[0][0][0] == 0  # the measured steps are not among them


def test_times_are_measured_once(models: Path, tmp_path: Path) -> None:
    engine = CHAIN_V2.with_options("again", speculative_switch_policy="goodput")
    logs = [started_log(engine, models, tmp_path) for _ in range(2)]
    assert "step times measured in" in logs[0]
    (file,) = (tmp_path / "cache").iterdir()
    assert f"step times are those of {file}" in logs[1]
    assert "step times measured in" not in logs[1]


def started_log(engine: Engine, models: Path, folder: Path) -> str:
    environment = {"SGLANG_SPEC_SWITCH_CACHE": str(folder / "cache")}
    served = start_engine(engine, models, folder, environment)
    try:
        served.wait_until_healthy()
        return served.log.read_text()
    finally:
        served.stop()


def test_a_table_that_cannot_be_read_ends_the_start(models: Path, tmp_path: Path) -> None:
    engine = CHAIN_V2.with_options("no-table", speculative_switch_policy="goodput")
    environment = {"SGLANG_SPEC_SWITCH_TIMES": str(tmp_path / "missing.json")}
    served = start_engine(engine, models, tmp_path, environment)
    try:
        assert served.process.wait(PATIENCE_S) == 2
    finally:
        served.stop()
    message = served.log.read_text()
    assert "speculation switch: step times cannot be read" in message
    assert "missing.json" in message
    assert "Traceback" not in message


def check_cache(cache: Path, engine: Engine) -> None:
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    assert kept["key"]["speculative_num_steps"] == engine.options["speculative_num_steps"]
    assert list(kept["times"]["on"]["seconds"]) == ["1", "2", "4", "8"]


def check_state(state: dict[str, Any]) -> None:
    assert (state["state"], state["reason"]) == ("active", None)
    estimates = state["estimates"]
    assert estimates["break_even"] == pytest.approx(
        estimates["t_on_ms"] / estimates["t_off_ms"], rel=0.01
    )
    assert estimates["slowness"]["on"] or estimates["slowness"]["off"]


async def texts(served: ServerProcess, requests: int) -> list[str]:
    body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 200}
    body |= {"temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        replies = await asyncio.gather(
            *(client.post(served.url + "/v1/completions", json=body) for _ in range(requests))
        )
    return [reply.json()["choices"][0]["text"] for reply in replies]
