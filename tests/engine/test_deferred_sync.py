"""Deferred draft sync: OFF steps keep what the draft needs, and it catches up later. Answers do not
tell whether it did; accept lengths do.
"""

import sys
from pathlib import Path

import pytest

from tests.engine.harness.cases import (
    ARRIVALS,
    CROWD,
    FEATURES,
    GAPS,
    LONG_GAP,
    LONG_LOGPROBS,
    RESUMED,
    SQUEEZED,
)
from tests.engine.harness.comparing import accept_ratio, assert_same_answers
from tests.engine.harness.laboratory import CaseError, Laboratory, finished
from tests.engine.harness.scenario import (
    CHAIN_V1,
    CHAIN_V2,
    CHAIN_V2_PAGED,
    CLEAN,
    PLAIN,
    TREE,
    Case,
    CaseResult,
    Engine,
    Job,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOLERANCE = 0.02
STALE = 0.9
ENGINES = (CHAIN_V2, CHAIN_V2_PAGED)
ALL = list(FEATURES.values())
EXACT = [name for name in FEATURES if name != "penalties"]  # see test_switching.py
PLAIN_JOB = Job(PLAIN, ALL)
RELEASE = "void-hook:sglang.srt.mem_cache.common.release_kv_cache"


def deferred(
    engine: Engine, cases: list[Case], sabotage: str | None = None, **settings: str
) -> Job:
    """An engine with deferred sync; settings by the end of their variables' names."""
    values = {"DRAFT_SYNC": "deferred", **settings}
    environment = {f"SGLANG_SPEC_SWITCH_{name}": value for name, value in values.items()}
    return Job(engine, cases, environment, sabotage)


def above(running: int, engine: Engine, cases: list[Case], **more: str) -> Job:
    """OFF above so many running requests, ON again at once."""
    name = str(running)
    thresholds = {"DISABLE_BATCH_THRESHOLD": name, "ENABLE_BATCH_THRESHOLD": name}
    return deferred(engine, cases, **thresholds, DWELL_STEPS="1", **more)


def syncs(result: CaseResult) -> dict[str, int]:
    counts: dict[str, int] = result.internal_state["spec_switch"]["draft_syncs"]
    return counts


SWITCHING = [
    deferred(CHAIN_V2, ALL, SCHEDULE="every:1", SYNC_WINDOW="1"),
    deferred(CHAIN_V2, ALL, SCHEDULE="every:2"),
    deferred(CHAIN_V2, ALL, SCHEDULE="every:5", SYNC_WINDOW="3"),
    deferred(CHAIN_V2_PAGED, ALL, SCHEDULE="random:7", SYNC_WINDOW="3"),
    above(3, CHAIN_V2, ALL),
]


@pytest.mark.parametrize("feature", EXACT)
@pytest.mark.parametrize("job", SWITCHING, ids=str)
def test_answers_are_those_of_the_plain_engine(
    job: Job, feature: str, laboratory: Laboratory
) -> None:
    result = laboratory.result(job, feature)
    assert_same_answers(result, laboratory.result(PLAIN_JOB, feature))
    assert result.accounting == CLEAN


GAP_JOBS = [
    *(deferred(CHAIN_V2, [GAPS], SCHEDULE=f"every:{gap}") for gap in (1, 4, 16, 64)),
    deferred(CHAIN_V2, [GAPS], SCHEDULE="every:16", SYNC_WINDOW="5"),
    deferred(CHAIN_V2, [GAPS], SCHEDULE="random:3", SYNC_WINDOW="1"),
    deferred(CHAIN_V2_PAGED, [GAPS], SCHEDULE="every:16", SYNC_WINDOW="7"),
    deferred(CHAIN_V2, [LONG_LOGPROBS], SCHEDULE="every:4", SYNC_WINDOW="3"),
    above(8, CHAIN_V2, [LONG_GAP]),
]


@pytest.mark.parametrize("job", GAP_JOBS, ids=str)
def test_accept_length_after_a_gap_is_as_if_never_off(job: Job, laboratory: Laboratory) -> None:
    """The gap of the last one is of 256 steps."""
    (case,) = job.cases
    result = laboratory.result(job, case.name)
    reference = laboratory.result(Job(job.engine, [case]), case.name)
    assert result.tokens == reference.tokens
    assert accept_ratio(result, reference) == pytest.approx(1.0, abs=TOLERANCE)
    assert result.accounting == CLEAN
    direct = result.internal_state["spec_switch"]["direct_steps"]
    assert (direct == 0) == (case is LONG_LOGPROBS)
    if case is LONG_GAP:
        assert "off" * 256 in "".join(result.modes)


@pytest.mark.parametrize("sabotage", [None, RELEASE])
def test_the_draft_kv_is_that_of_a_sync_at_each_step(sabotage: str | None, models: Path) -> None:
    """Compared position by position, by the module that does so on a GPU, too."""
    command = [sys.executable, "-m", "tests.engine.harness.draft_kv", str(models)]
    command += ["--sabotage", sabotage] if sabotage else []
    answer = finished(command, timeout_s=600)
    assert "888 positions, " in answer.stdout, answer.stderr[-2000:]
    assert answer.returncode == (1 if sabotage else 0), answer.stdout


def test_off_steps_run_no_draft_until_the_window_is_full(laboratory: Laboratory) -> None:
    result = laboratory.result(deferred(CHAIN_V2, [GAPS], SCHEDULE="every:64"), "gaps")
    figures = result.internal_state["spec_switch"]
    off, resumed = result.modes.count("off"), "".join(result.modes).count("offon")
    assert syncs(result)["resume"] == resumed > 0
    assert 0 < syncs(result)["full"] <= off // 16
    assert figures["direct_steps"] == off
    assert figures["deferred_positions"] >= figures["tokens"]["off"] > 0


@pytest.mark.parametrize("schedule", ["every:4", "every:64"])
def test_a_draft_that_never_catches_up_would_be_noticed(
    schedule: str, laboratory: Laboratory
) -> None:
    lost = deferred(CHAIN_V2, [GAPS], "never-write-owed-kv", SCHEDULE=schedule)
    result = laboratory.result(lost, "gaps")
    reference = laboratory.result(Job(CHAIN_V2, [GAPS]), "gaps")
    assert result.tokens == reference.tokens
    assert accept_ratio(result, reference) < STALE


def second_turn(job: Job, laboratory: Laboratory) -> list[tuple[int, int]]:
    """Return what each step of a second turn added, whose first turn was OFF."""
    result = laboratory.result(job, "resumed")
    first, _, second = result.outputs
    if job.environment:
        assert {result.modes[step] for step, _, _ in first.steps} == {"off"}
        assert {result.modes[step] for step, _, _ in second.steps} == {"on"}
    assert second.cached_tokens > 32
    assert result.accounting == CLEAN
    return [(before, added) for _, before, added in second.steps]


@pytest.mark.parametrize("window", ["16", "64"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_second_turn_accepts_as_if_the_first_had_not_been_off(
    engine: Engine, window: str, laboratory: Laboratory
) -> None:
    """What the first turn owed was written when it ended, before the prefix cache was asked."""
    job = above(1, engine, [RESUMED], SYNC_WINDOW=window)
    stock = Job(engine, [RESUMED])
    assert second_turn(job, laboratory) == second_turn(stock, laboratory)
    assert syncs(laboratory.result(job, "resumed"))["end"] == 1


def test_nothing_is_written_for_requests_that_no_cache_keeps(laboratory: Laboratory) -> None:
    uncached = CHAIN_V2.with_options("uncached", disable_radix_cache=True)
    result = laboratory.result(above(1, uncached, [RESUMED]), "resumed")
    assert result.internal_state["spec_switch"]["deferred_positions"] > 0
    assert syncs(result)["end"] == 0


@pytest.mark.parametrize("sabotage", [RELEASE, "never-write-owed-kv"])
def test_a_prefix_cached_without_its_draft_kv_would_be_noticed(
    sabotage: str, laboratory: Laboratory
) -> None:
    whole = above(1, CHAIN_V2, [RESUMED], SYNC_WINDOW="64")
    job = Job(CHAIN_V2, whole.cases, whole.environment, sabotage)
    stock = Job(CHAIN_V2, [RESUMED])
    assert len(second_turn(job, laboratory)) > len(second_turn(stock, laboratory)) / STALE


def first_steps(job: Job, laboratory: Laboratory) -> dict[int, int]:
    """Return what each request's first decode step added, if it was ON."""
    result = laboratory.result(job, "arrivals")
    mode = "on" if job.environment else None
    return {request: n for (request, before), n in result.accepted(mode).items() if before == 1}


@pytest.mark.parametrize("sabotage", [None, "keep-no-prompts"])
def test_a_request_that_comes_while_off_drafts_at_once(
    sabotage: str | None, laboratory: Laboratory
) -> None:
    job = deferred(CHAIN_V2, [ARRIVALS], sabotage, SCHEDULE="every:2")
    found, stock = (first_steps(each, laboratory) for each in (job, Job(CHAIN_V2, [ARRIVALS])))
    assert len(found) >= 10
    assert (found == {request: stock[request] for request in found}) == (sabotage is None)


SQUEEZED_JOBS = [
    deferred(engine.with_options("squeezed", **SQUEEZED), [CROWD], SCHEDULE=schedule)
    for engine in ENGINES
    for schedule in ("off", "every:1", "random:3")
]


@pytest.mark.parametrize("job", SQUEEZED_JOBS, ids=str)
def test_retracted_requests_come_back_with_the_same_answers(
    job: Job, laboratory: Laboratory
) -> None:
    result = laboratory.result(job, "crowd")
    assert sum(output.retractions for output in result.outputs) > 0
    assert_same_answers(result, laboratory.result(Job(PLAIN, [CROWD]), "crowd"))
    assert result.accounting == CLEAN


RANKS_CASES = [FEATURES[name] for name in ("staggered", "burst", "stops", "aborts", "turns")]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
ONE_RANK = (
    deferred(CHAIN_V2, RANKS_CASES, SCHEDULE="random:7", SYNC_WINDOW="3"),
    above(3, CHAIN_V2, RANKS_CASES),
)
RANKS_JOBS = [
    Job(job.engine.on_two_ranks(), job.cases, {**CORES, **job.environment}) for job in ONE_RANK
]


@pytest.mark.parametrize("case", [case.name for case in RANKS_CASES])
@pytest.mark.parametrize("job", RANKS_JOBS, ids=str)
def test_two_ranks_write_in_the_same_passes(job: Job, case: str, laboratory: Laboratory) -> None:
    """The draft's embedding is split over the ranks: a pass that one of them skips would hang."""
    first, second = (laboratory.result(job, case, rank) for rank in (0, 1))
    assert_same_answers(first, laboratory.result(PLAIN_JOB, case))
    assert first.tokens == second.tokens
    assert first.modes == second.modes
    assert syncs(first) == syncs(second)
    assert first.accounting == second.accounting == CLEAN


@pytest.mark.parametrize("engine", [TREE, CHAIN_V1], ids=str)
def test_a_worker_without_overlap_is_refused(engine: Engine, laboratory: Laboratory) -> None:
    job = deferred(engine, [RESUMED], SCHEDULE="off")
    with pytest.raises(CaseError, match="speculative-switch-draft-sync deferred cannot be used"):
        laboratory.result(job, "resumed")
