"""Parts of the steering, taken away: each shows in a figure that the whole meets."""

from dataclasses import replace

import pytest

from loadtest.virtual.arms import run_case
from loadtest.virtual.bench import Case
from loadtest.virtual.mutations import MUTATIONS, Mutation
from loadtest.virtual.scenario import Start

# Of each mutation, by name: a case that shows it, the start and the seed. `sim --mutations` runs
# all cases.
_SHOWN = {
    "no probes": (("recovery-chain", None), Start.COLD, 1),
    "no optimism": (("steady-tree", 2), Start.COLD, 1),
    "pure buckets": (("trace-chain", 0.8), Start.COLD, 1),
    "a split on shared GPUs": (("shared-chain", 16), Start.CALIBRATED, 1),
    "comparison at equal load on shared GPUs": (
        ("trace-shared-field", 0.1),
        Start.CALIBRATED,
        1,
    ),
}


def place(case: Case) -> tuple[str, float | None]:
    return case.scenario.name, case.level if case.level is not None else case.demand


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_part_that_is_taken_away_is_missed(mutation: Mutation) -> None:
    where, start, seed = _SHOWN[mutation.name]
    (case,) = (case for case in mutation.cases() if place(case) == where)
    case = replace(case, scenario=replace(case.scenario, starts=(start,)))
    whole, without = (run_case(one, seed, first=False) for one in (case, mutation.mutate(case)))
    assert mutation.seen([whole], [without]) is not None
