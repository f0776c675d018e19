"""A trace of requests with the statistics of conversation traffic, made from a seed.

It resembles the conversation trace of the Azure LLM inference dataset 2023 (P. Patel et al.,
"Splitwise", ISCA 2024) in what steering depends on, and holds none of its lines:

- lengths: prompt and output are drawn independently from the quantiles below, linear between them
  (means of about 1,150 and 210 tokens; theirs are nearly uncorrelated);
- arrivals: a Poisson process whose rate wanders. The logarithm of the rate is the sum of three
  Ornstein-Uhlenbeck processes, so that the variance of the counts in windows of 1, 10, 60 and 300
  seconds is about 1.4, 4, 16 and 55 times their mean, as there.
"""

import random
from bisect import bisect_right
from math import exp, sqrt

from loadtest.reading import Arrival

MEAN_PER_S = 5.53
# Standard deviation and time constant in seconds of each part of the logarithm of the rate.
_WANDERING = ((0.18, 600.0), (0.11, 60.0), (0.16, 3.0))
_STEP_S = 0.5
_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_PROMPT_TOKENS = (4, 30, 180, 205, 400, 1000, 1200, 2700, 4050, 4150, 7000)
_OUTPUT_TOKENS = (7, 16, 41, 54, 85, 130, 395, 425, 450, 600, 1000)


def synthetic_trace(requests: int, seed: int) -> tuple[Arrival, ...]:
    """Return so many requests. The same seed gives the same ones; a longer trace begins alike."""
    rng = random.Random(f"{seed}/trace")  # noqa: S311 - load, not secrets
    # Each process starts in its stationary distribution.
    parts = [sd * rng.gauss(0.0, 1.0) for sd, _ in _WANDERING]
    centre = -sum(sd * sd for sd, _ in _WANDERING) / 2
    rows: list[Arrival] = []
    start_s = 0.0
    while len(rows) < requests:
        rate = MEAN_PER_S * exp(centre + sum(parts))
        at_s = start_s + rng.expovariate(rate)
        while at_s < start_s + _STEP_S and len(rows) < requests:
            rows.append(Arrival(at_s, _draw(_PROMPT_TOKENS, rng), _draw(_OUTPUT_TOKENS, rng)))
            at_s += rng.expovariate(rate)
        start_s += _STEP_S
        for place, (sd, tau_s) in enumerate(_WANDERING):
            keep = exp(-_STEP_S / tau_s)
            parts[place] = keep * parts[place] + sd * sqrt(1 - keep * keep) * rng.gauss(0.0, 1.0)
    return tuple(rows)


def _draw(quantiles: tuple[int, ...], rng: random.Random) -> int:
    share = rng.random()
    at = min(bisect_right(_SHARES, share), len(_SHARES) - 1)
    low, high = _SHARES[at - 1], _SHARES[at]
    part = (share - low) / (high - low)
    return round(quantiles[at - 1] + part * (quantiles[at] - quantiles[at - 1]))
