"""What "the same answers as the plain engine" means."""

from itertools import pairwise

from tests.engine.harness.scenario import CaseResult

LOGPROB_TOLERANCE = 1e-4


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


def steps_are_contiguous(result: CaseResult) -> bool:
    """Whether every step starts where the one before it ended: no token was lost or written
    twice.
    """
    return all(
        start + added == next_start
        for output in result.outputs
        for (start, added), (next_start, _) in pairwise(output.steps)
    )
