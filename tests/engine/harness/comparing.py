"""What "the same answers as the plain engine" means."""

from collections import Counter
from collections.abc import Sequence

from tests.engine.harness.scenario import CaseResult

LOGPROB_TOLERANCE = 1e-4
COMMON_STEPS_MIN = 150
CATEGORY_MIN = 10


def assert_same_answers(result: CaseResult, plain: CaseResult) -> None:
    """Token for token, finish reasons and logprobs; an aborted answer is as long as it happened
    to get.
    """
    assert len(result.outputs) == len(plain.outputs)
    for index, (output, expected) in enumerate(zip(result.outputs, plain.outputs, strict=True)):
        length = len(expected.tokens)
        if expected.finish == "abort":
            length = min(length, len(output.tokens))
        assert output.tokens[:length] == expected.tokens[:length], f"request {index}"
        assert output.finish == expected.finish, f"request {index}"
        if expected.finish != "abort":
            assert len(output.tokens) == length, f"request {index}"
        assert_same_logprobs(output.logprobs, expected.logprobs)


def assert_same_logprobs(logprobs: list[float], expected: list[float]) -> None:
    """Equal up to float32 rounding of sums in another order."""
    assert len(logprobs) == len(expected)
    for value, wanted in zip(logprobs, expected, strict=True):
        assert abs(value - wanted) < LOGPROB_TOLERANCE


def accept_ratio(result: CaseResult, reference: CaseResult) -> float:
    """Tokens per ON step relative to an engine that is never off, at the same places of the text.

    What a step accepts depends on the text before it and on the draft's state. Where both engines
    began a step after the same tokens, the text is the same, so the ratio tells about the draft.
    """
    steps, expected = result.accepted("on"), reference.accepted()
    common = steps.keys() & expected.keys()
    assert len(common) >= COMMON_STEPS_MIN, f"only {len(common)} steps to compare"
    return sum(steps[place] for place in common) / sum(expected[place] for place in common)


def tokens_at(position: int, result: CaseResult) -> list[int]:
    """The token at one place of every answer."""
    return [output.tokens[position] for output in result.outputs]


def homogeneity_p_value(one: Sequence[int], other: Sequence[int]) -> float:
    """Chi-square test of whether two samples of tokens come from one distribution.

    Tokens seen too rarely for the test are counted as one.
    """
    # Here, because `make test` collects this module without the engine's environment.
    from scipy.stats import chi2_contingency

    counts = Counter(one), Counter(other)
    total = counts[0] + counts[1]
    common = [token for token in total if total[token] >= CATEGORY_MIN]
    table = [[count[token] for token in common] for count in counts]
    for row, sample in zip(table, (one, other), strict=True):
        row.append(len(sample) - sum(row))
    if table[0][-1] + table[1][-1] < CATEGORY_MIN:
        table = [row[:-1] for row in table]
    return float(chi2_contingency(table).pvalue)
