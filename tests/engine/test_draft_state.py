"""The draft after OFF steps: greedy answers do not tell when it went stale, accept lengths do."""

import pytest

from tests.engine.harness.cases import GAPS, LONG, RESUMED
from tests.engine.harness.comparing import accept_ratio
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import (
    CHAIN_V1_PAGED,
    CHAIN_V2,
    CHAIN_V2_PAGED,
    CLEAN,
    DEEP_TREE,
    TREE,
    Case,
    Engine,
    Job,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GAP_STEPS = (1, 4, 16, 64)
TOLERANCE = 0.02
ENGINES = (TREE, CHAIN_V2, CHAIN_V2_PAGED)


def scheduled(engine: Engine, case: Case, schedule: str, **more: str) -> Job:
    return Job(engine, [case], {"SGLANG_SPEC_SWITCH_SCHEDULE": schedule, **more})


def stock(engine: Engine, case: Case) -> Job:
    return Job(engine, [case])


GAP_JOBS = [
    *(scheduled(engine, GAPS, f"every:{gap}") for engine in (TREE, CHAIN_V2) for gap in GAP_STEPS),
    *(scheduled(engine, GAPS, "every:16") for engine in (DEEP_TREE, CHAIN_V1_PAGED)),
]


@pytest.mark.parametrize("job", GAP_JOBS, ids=str)
def test_accept_length_after_a_gap_is_as_if_never_off(job: Job, laboratory: Laboratory) -> None:
    result = laboratory.result(job, "gaps")
    reference = laboratory.result(stock(job.engine, GAPS), "gaps")
    assert set(result.modes) == {"on", "off"}
    assert result.tokens == reference.tokens
    assert accept_ratio(result, reference) == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("engine", [TREE, CHAIN_V2], ids=str)
def test_a_stale_draft_would_be_noticed(engine: Engine, laboratory: Laboratory) -> None:
    """An OFF step without its draft extend changes no answer, but what follows accepts less."""
    stale = scheduled(engine, LONG, "every:4", SGLANG_SPEC_SWITCH_SKIP_DRAFT_EXTEND="1")
    result = laboratory.result(stale, "long")
    reference = laboratory.result(stock(engine, LONG), "long")
    assert result.tokens == reference.tokens
    assert accept_ratio(result, reference) < 0.9


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_second_turn_accepts_as_if_the_first_had_not_been_off(
    engine: Engine, laboratory: Laboratory
) -> None:
    """Two requests are OFF, one alone is ON, and finds its first turn in the prefix cache."""
    threshold = {
        "SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD": "1",
        "SGLANG_SPEC_SWITCH_ENABLE_BATCH_THRESHOLD": "1",
        "SGLANG_SPEC_SWITCH_DWELL_STEPS": "1",
    }
    result = laboratory.result(Job(engine, [RESUMED], threshold), "resumed")
    reference = laboratory.result(stock(engine, RESUMED), "resumed")
    first, _, second = result.outputs
    assert {result.modes[step] for step, _, _ in first.steps} == {"off"}
    assert {result.modes[step] for step, _, _ in second.steps} == {"on"}
    assert second.cached_tokens > 32
    assert result.tokens == reference.tokens
    taken = [(before, added) for _, before, added in second.steps]
    assert taken == [(before, added) for _, before, added in reference.outputs[2].steps]
    assert result.accounting == CLEAN
