"""The numbers of the learner and of the learnt policy, in one place.

Each is there for a failure that was seen without it; a test switches it off and sees the failure.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the learner weighs what it sees, and what the policy does with it.

    A window's weight is its busy seconds, at most 1: weights count seconds of full evidence.
    """

    # A curve's prior slope as a share of its level at zero: small, so that what was never tried
    # looks worth a try.
    slope_prior: float = 0.02
    # How much less than its estimate a point with a weight of 1 is taken to cost.
    optimism: float = 0.05
    # What was seen is forgotten at this pace, and never weighs more than so many windows.
    memory_s: float = 60.0
    weight_max: float = 20.0
    # The weight at which a level's own evidence counts as much as the line through all of them.
    residual_weight: float = 2.0
    # The slope comes from a line through all levels. Off: from the two levels beside the load.
    pooled_slope: bool = True
    # Windows in a row this far off the forecast, on one side, mean that the server has changed.
    change_share: float = 0.15
    change_windows: int = 2
    # A server not seen for so long gets a request; what that loses is at most this share of all.
    explore_interval_s: float = 20.0
    explore_share: float = 0.01
    # A conversation stays with its server if that costs at most this share more.
    affinity_share: float = 0.05
    # Shared GPUs: gain that a change must promise, the share of its cost that staying must have
    # lost before, and how long to stay after it.
    switch_gain: float = 0.02
    switch_cost: float = 0.5
    switch_dwell_s: float = 60.0
    # Shared GPUs: above this share of the capacity a change starts an overload.
    switch_load_max: float = 0.45
    # Shared GPUs: leave a speculating server at once where the plain one is so many times faster.
    overload_ratio: float = 1.5
    # Shared GPUs: compare the mean load that each server would have at the traffic's token rate.
    # Off: compare both at the load of now, which the slower server itself has raised.
    compare_at_equal_rate: bool = True
    # Trust what is measured of interference over the declared layout.
    learn_layout: bool = True
