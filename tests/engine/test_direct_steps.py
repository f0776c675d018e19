"""OFF steps without the stock verification: taken wherever a batch needs none of its features."""

import pytest

from tests.engine.harness.cases import BIASED, DRAWN, FEATURES, FORBIDDEN, SAMPLED, SHOWN
from tests.engine.harness.comparing import assert_same_answers, tokens_at
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


@pytest.mark.parametrize(
    "case",
    [FEATURES["logprobs"], FEATURES["penalties"], BIASED, FORBIDDEN],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_feature_of_the_stock_verification_is_left_to_it(
    engine: Engine, case: Case, laboratory: Laboratory
) -> None:
    processors = {"enable_custom_logit_processor": True}
    job = Job(engine.with_options("processors", **processors), [case], OFF)
    direct, all_steps = steps(job, laboratory)
    assert direct == 0 < all_steps
    if case is FORBIDDEN and engine.spec_v2:
        return  # the stock verification of v2 ignores custom processors
    plain = Job(PLAIN.with_options("processors", **processors), [case])
    assert_same_answers(*(laboratory.result(each, case.name) for each in (job, plain)))


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


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_hidden_states_are_those_of_the_stock_verification(
    engine: Engine, laboratory: Laboratory
) -> None:
    engine = engine.with_options("shown", enable_return_hidden_states=True)
    result, stock = (
        laboratory.result(Job(engine, [SHOWN], each), "shown") for each in (OFF, STALE)
    )
    assert result.internal_state["spec_switch"]["direct_steps"] > 0
    for request, output, expected in zip(
        SHOWN.requests, result.outputs, stock.outputs, strict=True
    ):
        assert len(output.hidden_states) == (len(output.steps) if request.hidden_states else 0)
        for states, wanted in zip(output.hidden_states, expected.hidden_states, strict=True):
            assert states == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_ranks_that_draw_differently_go_on_with_one_of_the_draws(
    engine: Engine, laboratory: Laboratory
) -> None:
    """The first token is the prefill's, where stock does not make ranks agree."""
    job = Job(engine.on_two_ranks(), [DRAWN], {**OFF, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    first, second = (laboratory.result(job, "drawn", rank) for rank in (0, 1))
    assert first.internal_state["spec_switch"]["direct_steps"] == len(first.modes) > 0
    assert tokens_at(0, first) != tokens_at(0, second)
    for one, other in zip(first.tokens, second.tokens, strict=True):
        assert one[1:] == other[1:]
    assert first.accounting == second.accounting == CLEAN
