"""The fixture itself: stock SGLang on the CPU, and proof that its checks notice a broken engine."""

import pytest

from tests.engine.harness.cases import FEATURES, LONG, SAMPLED
from tests.engine.harness.comparing import assert_same_answers, homogeneity_p_value, tokens_at
from tests.engine.harness.laboratory import CaseError, Laboratory
from tests.engine.harness.scenario import (
    CHAIN_V1_PAGED,
    CHAIN_V2,
    CHAIN_V2_PAGED,
    CLEAN,
    PLAIN,
    SPECULATIVE,
    TREE,
    Engine,
    Job,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Stock SGLang applies penalties only approximately to the drafted tokens of a step.
EXACT = [name for name in FEATURES if name != "penalties"]
STOCK = {engine.name: Job(engine, list(FEATURES.values())) for engine in (PLAIN, *SPECULATIVE)}


@pytest.mark.parametrize("feature", EXACT)
@pytest.mark.parametrize("job", [STOCK[engine.name] for engine in SPECULATIVE], ids=str)
def test_speculation_gives_the_plain_engines_greedy_answers(
    job: Job, feature: str, laboratory: Laboratory
) -> None:
    plain = laboratory.result(STOCK["plain"], feature)
    result = laboratory.result(job, feature)
    assert_same_answers(result, plain)
    assert result.accounting == CLEAN


def test_the_cases_contain_what_they_are_named_for(laboratory: Laboratory) -> None:
    plain = {name: laboratory.result(STOCK["plain"], name) for name in FEATURES}
    assert plain["burst"].batch_sizes[0] == 1
    assert max(plain["burst"].batch_sizes) == 10
    assert {output.finish for output in plain["stops"].outputs} == {"stop", "length"}
    assert [output.finish for output in plain["aborts"].outputs] == ["abort"] * 6 + ["length"] * 2
    assert all(output.cached_tokens > 0 for output in plain["turns"].outputs[2:])
    assert [output.finish for output in plain["grammar"].outputs[:2]] == ["stop", "stop"]
    assert all(len(output.logprobs) == 20 for output in plain["logprobs"].outputs)
    assert len({tuple(output.tokens) for output in plain["parallel"].outputs}) == 1


@pytest.mark.parametrize("engine", [TREE, CHAIN_V1_PAGED, CHAIN_V2_PAGED], ids=str)
def test_the_fast_index_kernels_are_sglangs_own(engine: Engine, laboratory: Laboratory) -> None:
    """Steps, not tokens alone: a wrong slot of the draft would show in what is accepted."""
    own = Job(engine, [FEATURES["staggered"]], {"CPU_ENGINE_TRITON": "1"})
    fast = laboratory.result(STOCK[engine.name], "staggered")
    assert laboratory.result(own, "staggered").outputs == fast.outputs


def sabotaged(name: str | None) -> Job:
    return Job(TREE, [FEATURES["staggered"], LONG], sabotage=name)


@pytest.mark.parametrize("sabotage", ["accept-any-child", "show-whole-tree"])
def test_wrong_verification_changes_the_answers(sabotage: str, laboratory: Laboratory) -> None:
    plain = laboratory.result(STOCK["plain"], "staggered")
    assert laboratory.result(sabotaged(sabotage), "staggered").tokens != plain.tokens


def test_a_lost_kv_slot_is_noticed(laboratory: Laboratory) -> None:
    with pytest.raises(CaseError, match="memory leak"):
        laboratory.result(sabotaged("leak-kv-slot"), "staggered")


def test_a_draft_without_hidden_states_accepts_less(laboratory: Laboratory) -> None:
    """The answers stay right, so only the accept length can tell."""
    stock = laboratory.result(sabotaged(None), "long")
    blind = laboratory.result(sabotaged("blind-draft"), "long")
    assert blind.tokens == stock.tokens
    assert stock.accept_length > 1.6
    assert blind.accept_length < 0.8 * stock.accept_length


def test_wrong_sampling_changes_the_distribution(laboratory: Laboratory) -> None:
    plain = laboratory.result(Job(PLAIN, [SAMPLED]), "sampled")
    wrong = laboratory.result(Job(TREE, [SAMPLED], sabotage="sample-any-child"), "sampled")
    assert homogeneity_p_value(*(tokens_at(1, each) for each in (plain, wrong))) < 1e-5


@pytest.mark.parametrize("engine", [TREE, CHAIN_V2], ids=str)
def test_sampling_follows_the_plain_engines_distribution(
    engine: Engine, laboratory: Laboratory
) -> None:
    plain = laboratory.result(Job(PLAIN, [SAMPLED]), "sampled")
    result = laboratory.result(Job(engine, [SAMPLED]), "sampled")
    for position in range(3):
        samples = (tokens_at(position, each) for each in (plain, result))
        assert homogeneity_p_value(*samples) > 1e-3, position
