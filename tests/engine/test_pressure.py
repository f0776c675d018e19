"""Switching while the KV pool is short: what OFF reserves, retraction, and switches under it."""

import pytest

from tests.engine.harness.cases import CROWD, SQUEEZED
from tests.engine.harness.comparing import assert_same_answers
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import (
    CHAIN_V1,
    CHAIN_V2,
    CHAIN_V2_PAGED,
    CLEAN,
    PLAIN,
    TREE,
    CaseResult,
    Engine,
    Job,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENGINES = (TREE, CHAIN_V1, CHAIN_V2, CHAIN_V2_PAGED)
SCHEDULES = ("on", "off", "every:1", "every:2", "random:3")
ROOMY = Job(PLAIN, [CROWD])


def squeezed(engine: Engine, schedule: str) -> Job:
    small = engine.with_options("squeezed", **SQUEEZED)
    return Job(small, [CROWD], {"SGLANG_SPEC_SWITCH_SCHEDULE": schedule})


def retractions(result: CaseResult) -> int:
    return sum(output.retractions for output in result.outputs)


SQUEEZED_JOBS = [squeezed(engine, schedule) for engine in ENGINES for schedule in SCHEDULES]


@pytest.mark.parametrize("job", SQUEEZED_JOBS, ids=str)
def test_retracted_requests_come_back_with_the_same_answers(
    job: Job, laboratory: Laboratory
) -> None:
    result = laboratory.result(job, "crowd")
    assert retractions(result) > 0
    assert_same_answers(result, laboratory.result(ROOMY, "crowd"))
    assert result.accounting == CLEAN


def test_a_tree_that_is_off_retracts_no_more_than_plain(laboratory: Laboratory) -> None:
    """An OFF step reserves what it needs, not room for a tree."""
    plain = PLAIN.with_options("squeezed", **SQUEEZED)
    expected = retractions(laboratory.result(Job(plain, [CROWD]), "crowd"))
    off = retractions(laboratory.result(squeezed(TREE, "off"), "crowd"))
    always_on = retractions(laboratory.result(squeezed(TREE, "on"), "crowd"))
    assert off <= expected < always_on


def test_a_chain_that_is_off_reserves_one_token_a_step(laboratory: Laboratory) -> None:
    """In a pool of this size, reserving a whole chain would retract one request more."""
    size = {**SQUEEZED, "max_total_tokens": 288}
    off = Job(CHAIN_V2.with_options("288", **size), [CROWD], {"SGLANG_SPEC_SWITCH_SCHEDULE": "off"})
    expected = retractions(
        laboratory.result(Job(PLAIN.with_options("288", **size), [CROWD]), "crowd")
    )
    assert retractions(laboratory.result(off, "crowd")) <= expected


def test_a_switch_on_waits_for_room(laboratory: Laboratory) -> None:
    """The threshold alone would speculate all the time; a full pool keeps OFF going instead."""
    threshold = {
        "SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD": "2",
        "SGLANG_SPEC_SWITCH_ENABLE_BATCH_THRESHOLD": "2",
        "SGLANG_SPEC_SWITCH_DWELL_STEPS": "1",
    }
    small = TREE.with_options("squeezed", **SQUEEZED)
    result = laboratory.result(Job(small, [CROWD], threshold), "crowd")
    plain = PLAIN.with_options("squeezed", **SQUEEZED)
    expected = retractions(laboratory.result(Job(plain, [CROWD]), "crowd"))
    assert_same_answers(result, laboratory.result(ROOMY, "crowd"))
    assert set(result.modes) == {"on", "off"}
    assert retractions(result) <= expected
    assert result.accounting == CLEAN
