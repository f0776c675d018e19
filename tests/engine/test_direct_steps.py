"""OFF steps without the stock verification: taken wherever a batch needs none of its features."""

import pytest

from tests.engine.harness.cases import FEATURES, SAMPLED
from tests.engine.harness.comparing import assert_same_answers
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import CHAIN_V2, CLEAN, PLAIN, TREE, Case, Engine, Job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENGINES = (TREE, CHAIN_V2)
OFF = {"SGLANG_SPEC_SWITCH_SCHEDULE": "off"}
DIRECT = (FEATURES["staggered"], FEATURES["stops"], SAMPLED)
STALE = {**OFF, "SGLANG_SPEC_SWITCH_SKIP_DRAFT_EXTEND": "1"}


def steps(job: Job, laboratory: Laboratory) -> tuple[int, int]:
    """Return the direct steps of a job with one case, and all its decode steps."""
    result = laboratory.result(job, job.cases[0].name)
    return result.internal_state["spec_switch"]["direct_steps"], len(result.modes)


@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case.name)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_batch_that_needs_only_logits_is_stepped_directly(
    engine: Engine, case: Case, laboratory: Laboratory
) -> None:
    direct, all_steps = steps(Job(engine, [case], OFF), laboratory)
    assert direct == all_steps > 0


@pytest.mark.parametrize("feature", ["logprobs", "penalties"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_feature_of_the_stock_verification_is_left_to_it(
    engine: Engine, feature: str, laboratory: Laboratory
) -> None:
    direct, all_steps = steps(Job(engine, [FEATURES[feature]], OFF), laboratory)
    assert direct == 0 < all_steps


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_grammar_is_left_to_the_stock_verification_while_it_runs(
    engine: Engine, laboratory: Laboratory
) -> None:
    """One of the three requests has none and outlasts the others."""
    direct, all_steps = steps(Job(engine, [FEATURES["grammar"]], OFF), laboratory)
    assert 0 < direct < all_steps


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_diagnostic_that_leaves_the_draft_stale_steps_as_stock(
    engine: Engine, laboratory: Laboratory
) -> None:
    direct, all_steps = steps(Job(engine, [FEATURES["staggered"]], STALE), laboratory)
    assert direct == 0 < all_steps


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_both_kinds_of_off_step_give_the_same_answers(
    engine: Engine, laboratory: Laboratory
) -> None:
    """The stale draft's steps are stock's, and answers do not depend on the draft."""
    job = Job(engine, [FEATURES["staggered"]], STALE)
    result = laboratory.result(job, "staggered")
    plain = Job(PLAIN, list(FEATURES.values()))
    assert_same_answers(result, laboratory.result(plain, "staggered"))
    assert result.accounting == CLEAN
