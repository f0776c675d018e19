"""Tensor parallel: each rank has a scheduler and a switch of its own, and they must never differ.

A step in which one rank drafts and the other does not waits for ever, so an answer is itself proof
that none did; the records of both ranks are compared step by step besides.
"""

from collections.abc import Mapping

import pytest

from tests.engine.harness.cases import CROWD, FEATURES, SQUEEZED
from tests.engine.harness.comparing import assert_same_answers
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import CHAIN_V2, CLEAN, GOODPUT, PLAIN, TREE, Engine, Job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANKS = (0, 1)
CASES = [FEATURES[name] for name in ("staggered", "burst", "stops", "aborts", "chunked")]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
THRESHOLD = {
    "SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD": "3",
    "SGLANG_SPEC_SWITCH_ENABLE_BATCH_THRESHOLD": "2",
    "SGLANG_SPEC_SWITCH_DWELL_STEPS": "1",
}
ALTERNATING = {"SGLANG_SPEC_SWITCH_SCHEDULE": "every:1"}


def on_two_ranks(engine: Engine, switching: Mapping[str, str]) -> Job:
    return Job(engine.on_two_ranks(), CASES, {**CORES, **switching})


def squeezed(engine: Engine) -> Job:
    small = engine.on_two_ranks().with_options("squeezed", **SQUEEZED)
    return Job(small, [CROWD], {**CORES, **ALTERNATING})


JOBS = [
    on_two_ranks(engine, switching)
    for engine in (TREE, CHAIN_V2)
    for switching in (ALTERNATING, THRESHOLD, GOODPUT)
]


@pytest.mark.parametrize("case", [case.name for case in CASES])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_both_ranks_take_the_same_steps_to_the_plain_answers(
    job: Job, case: str, laboratory: Laboratory
) -> None:
    first, second = (laboratory.result(job, case, rank) for rank in RANKS)
    assert_same_answers(first, laboratory.result(Job(PLAIN, CASES), case))
    assert first.tokens == second.tokens
    assert first.modes == second.modes
    assert len(first.modes) == len(first.batch_sizes) > 0
    assert first.batch_sizes == second.batch_sizes
    assert first.accounting == second.accounting == CLEAN
    if case == "burst":
        assert set(first.modes) == {"on", "off"}


@pytest.mark.parametrize("job", [squeezed(engine) for engine in (TREE, CHAIN_V2)], ids=str)
def test_both_ranks_retract_alike(job: Job, laboratory: Laboratory) -> None:
    first, second = (laboratory.result(job, "crowd", rank) for rank in RANKS)
    assert sum(output.retractions for output in first.outputs) > 0
    assert_same_answers(first, laboratory.result(Job(PLAIN, [CROWD]), "crowd"))
    assert first.tokens == second.tokens
    assert first.modes == second.modes
    assert first.accounting == second.accounting == CLEAN
