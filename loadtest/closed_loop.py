"""An engine model in a closed loop, in virtual time: how it is compared with measurements.

As in the measurement: `concurrency` workers start together, each sends its next request when the
last has ended, and the rate is all output tokens over the whole time, the prefill burst at the
start included.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

from loadtest.engine_batch import Sequence
from loadtest.engine_model import Engine
from loadtest.engine_params import EngineParams, Rng

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 256
RUNNING_REQUESTS_MAX = 256


def rounds_of(concurrency: int) -> int:
    """Return the requests per worker of the measurement."""
    if concurrency <= 2:
        return 3
    return 2 if concurrency <= 128 else 1


def rate_tok_s(params: EngineParams, concurrency: int, rng: Rng) -> float:
    """Return the output rate of one closed-loop run, in tokens per second."""
    engine = Engine(params, max_running_requests=RUNNING_REQUESTS_MAX)
    left = [rounds_of(concurrency) - 1] * concurrency
    for worker in range(concurrency):
        engine.submit(Sequence(PROMPT_TOKENS, OUTPUT_TOKENS, key=worker))
    elapsed_s = 0.0
    while (duration_s := engine.begin()) is not None:
        elapsed_s += duration_s
        for sequence in engine.end(rng).ended:
            who = sequence.key
            assert isinstance(who, int)
            if left[who]:
                left[who] -= 1
                engine.submit(Sequence(PROMPT_TOKENS, OUTPUT_TOKENS, key=who))
    return engine.totals.output_tokens / elapsed_s


def mean_rate_tok_s(
    params: EngineParams, concurrency: int, rng: Rng, sequences: int = 128
) -> float:
    """Return the mean rate of as many runs as it takes to see `sequences` workers, two at least."""
    # Without speculation there is no luck: all runs are the same.
    runs = max(2, sequences // concurrency) if params.speculative else 1
    return sum(rate_tok_s(params, concurrency, rng) for _ in range(runs)) / runs


def derive_points(
    params: EngineParams, rates_tok_s: Seq[float], rng: Rng, iterations: int = 12
) -> tuple[tuple[int, float], ...]:
    """Return the step times with which closed loops run at `rates_tok_s`.

    A fixed point: each step time is scaled by what the loop at its batch size was too fast or too
    slow.
    """
    points = params.decode.points
    for _ in range(iterations):
        trial = replace(params, decode=replace(params.decode, points=points))
        points = tuple(
            (batch, step_s * mean_rate_tok_s(trial, batch, rng) / rate)
            for (batch, step_s), rate in zip(points, rates_tok_s, strict=True)
        )
    return points
