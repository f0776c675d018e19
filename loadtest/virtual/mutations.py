"""Mutations of the steering code: each takes a part away, and a demanded figure must then miss.

A figure that is met without the part would not show its loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.virtual.arms import CaseResult
from loadtest.virtual.bench import Case, cases
from loadtest.virtual.demands import Reached, demand
from loadtest.virtual.scenario import load
from router.core.tuning import Tuning
from router.core.types import Layout


@dataclass(frozen=True, slots=True)
class Mutation:
    """What is taken away, and of the figures named, in these scenarios, at least one must miss.

    `levels` keeps to those of a scenario that show it; none: all.
    """

    name: str
    scenarios: tuple[str, ...]
    demands: tuple[str, ...]
    tuning: Tuning | None = None
    layout: Layout | None = None
    levels: tuple[int, ...] = ()

    def cases(self) -> list[Case]:
        """Return the cases to run."""
        return [
            replace(case, tuning=self.tuning, layout=self.layout)
            for name in self.scenarios
            for case in cases(load(name))
            if not self.levels or case.level in self.levels
        ]

    def missed(self, results: Sequence[CaseResult]) -> list[Reached]:
        """Return the demands that miss, as one should."""
        found = (demand(name).reached(results) for name in self.demands)
        return [item for item in found if item is not None and not item.met]


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "no probes",
        ("recovery-chain",),
        ("recovery",),
        tuning=Tuning(explore_share=0.0),
    ),
    Mutation(
        "no optimism",
        ("steady-chain", "steady-tree"),
        ("steady-single", "steady-split"),
        tuning=Tuning(optimism=0.0, slope_prior=0.2),
        levels=(2, 3, 4, 6, 8),
    ),
    Mutation(
        "pure buckets",
        ("steady-chain", "steady-tree"),
        ("steady-single", "steady-split"),
        tuning=Tuning(pooled_slope=False),
        levels=(8, 16, 32, 64),
    ),
    Mutation(
        "a split on shared GPUs",
        ("shared-chain",),
        ("shared-single",),
        tuning=Tuning(learn_layout=False),
        layout=Layout.DISJOINT,
        levels=(16, 64),
    ),
    Mutation(
        "comparison at equal load on shared GPUs",
        ("trace-shared-chain", "trace-shared-tree"),
        ("shared-trace",),
        tuning=Tuning(compare_at_equal_rate=False),
    ),
)
