"""An engine model in a closed loop, in virtual time: how it is compared with measurements.

As in the measurement: `concurrency` workers start together, each sends its next request when the
last has ended, and the rate is all output tokens over the whole time, the prefill burst at the
start included.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

from loadtest.engine_params import EngineParams
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.virtual.loop import World
from loadtest.virtual.station import Server
from loadtest.workload import Fixed, Workload
from router.core.policy import FixedPolicy
from router.core.types import Role

LENGTHS = Fixed(256, 256)


def rounds_of(concurrency: int) -> int:
    """Return the requests per worker of the measurement."""
    if concurrency <= 2:
        return 3
    return 2 if concurrency <= 128 else 1


def rate_tok_s(params: EngineParams, concurrency: int, seed: int) -> float:
    """Return the output rate of one closed-loop run, in tokens per second."""
    requests = rounds_of(concurrency) * concurrency
    loop = ClosedLoop(Ramp(((0.0, float(concurrency)),)), requests=requests)
    world = World((Server("one", Role.BASE, params),), FixedPolicy(Role.BASE), seed=seed)
    run = world.run(loop, Workload("simulated", LENGTHS, seed), looks_s=())
    return run.tokens / run.duration_s


def mean_rate_tok_s(
    params: EngineParams, concurrency: int, seed: int, sequences: int = 128
) -> float:
    """Return the mean rate of as many runs as it takes to see `sequences` workers, two at least."""
    # Without speculation there is no luck: all runs are the same.
    runs = max(2, sequences // concurrency) if params.speculative else 1
    return sum(rate_tok_s(params, concurrency, 1000 * seed + i) for i in range(runs)) / runs


def derive_points(
    params: EngineParams, rates_tok_s: Seq[float], seed: int, iterations: int = 12
) -> tuple[tuple[int, float], ...]:
    """Return the step times with which closed loops run at `rates_tok_s`.

    A fixed point: each step time is scaled by what the loop at its batch size was too fast or too
    slow.
    """
    points = params.decode.points
    for _ in range(iterations):
        trial = replace(params, decode=replace(params.decode, points=points))
        points = tuple(
            (batch, step_s * mean_rate_tok_s(trial, batch, seed) / rate)
            for (batch, step_s), rate in zip(points, rates_tok_s, strict=True)
        )
    return points
