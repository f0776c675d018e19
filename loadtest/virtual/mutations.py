"""Mutations of the steering code: each takes a part away, and a demanded figure must then miss.

It must be met with the part, on the same case and seed: else it would show nothing.
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
    """What is taken away; of the figures named, in these scenarios, at least one must show it.

    `at` keeps to the levels or demands of a scenario that show it; none: all.
    """

    name: str
    scenarios: tuple[str, ...]
    demands: tuple[str, ...]
    tuning: Tuning | None = None
    layout: Layout | None = None
    at: tuple[float, ...] = ()

    def cases(self) -> list[Case]:
        """Return the cases to run, with nothing taken away."""
        return [
            case
            for name in self.scenarios
            for case in cases(load(name))
            if not self.at or case.level in self.at or case.demand in self.at
        ]

    def mutate(self, case: Case) -> Case:
        """Return a case without the part."""
        return replace(case, tuning=self.tuning, layout=self.layout)

    def seen(
        self, whole: Sequence[CaseResult], mutated: Sequence[CaseResult]
    ) -> tuple[Reached, Reached] | None:
        """Return a figure that is met by the whole and missed without the part, on the same case
        and seed: both, the worst such; None if there is none.
        """
        found = []
        for name in self.demands:
            for one, other in zip(whole, mutated, strict=True):
                pair = demand(name).reached([one]), demand(name).reached([other])
                if pair[0] and pair[1] and pair[0].met and not pair[1].met:
                    found.append((pair[0], pair[1]))
        return max(found, key=_gap, default=None)


def _gap(pair: tuple[Reached, Reached]) -> float:
    return abs(pair[0].value - pair[1].value) / pair[1].demand.limit


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
        at=(2, 3, 4, 6, 8),
    ),
    Mutation(
        "pure buckets",
        ("trace-chain",),
        ("trace-cold", "trace-p99"),
        tuning=Tuning(pooled_slope=False),
        at=(0.8, 1.1),
    ),
    Mutation(
        "a split on shared GPUs",
        ("shared-chain",),
        ("shared-single",),
        tuning=Tuning(learn_layout=False),
        layout=Layout.DISJOINT,
        at=(16, 64),
    ),
    Mutation(
        "comparison at equal load on shared GPUs",
        ("trace-shared-field",),
        ("shared-trace",),
        tuning=Tuning(compare_at_equal_rate=False),
        at=(0.1,),
    ),
)
