"""Prints accept lengths after gaps of OFF steps, relative to an engine that is never off: of a
draft that no OFF step extends, one that each extends, and one that catches up.

    PYTHONPATH=tests/engine/cpu:. python -m cpu_engine.models MODELS
    PYTHONPATH=tests/engine/cpu:. python -m tests.engine.harness.gaps MODELS

The models are the tests' own, whose draft reads all that it wrote; how much a hole costs another
draft is its own affair.
"""

import sys
import tempfile
from pathlib import Path

from tests.engine.harness.cases import GAPS
from tests.engine.harness.comparing import accept_ratio
from tests.engine.harness.laboratory import Laboratory
from tests.engine.harness.scenario import CHAIN_V2, Job

GAP_STEPS = (1, 4, 16, 64)
SYNCS = {
    "none": {"SGLANG_SPEC_SWITCH_SKIP_DRAFT_EXTEND": "1"},
    "each step": {},
    "deferred": {"SGLANG_SPEC_SWITCH_DRAFT_SYNC": "deferred"},
}


def main(models: Path) -> None:
    """Run every gap with every sync, and print one line a gap."""
    print(f"{'gap':>4}" + "".join(f"{name:>12}" for name in SYNCS))
    with tempfile.TemporaryDirectory() as logs, Laboratory(models, Path(logs)) as laboratory:
        reference = laboratory.result(Job(CHAIN_V2, [GAPS]), GAPS.name)
        for gap in GAP_STEPS:
            schedule = {"SGLANG_SPEC_SWITCH_SCHEDULE": f"every:{gap}"}
            ratios = (
                accept_ratio(
                    laboratory.result(Job(CHAIN_V2, [GAPS], {**schedule, **sync}), GAPS.name),
                    reference,
                )
                for sync in SYNCS.values()
            )
            print(f"{gap:>4}" + "".join(f"{ratio:12.3f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
