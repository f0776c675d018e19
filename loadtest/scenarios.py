"""The demo's scenarios: which two engine models, and how fast their clock runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loadtest.pacing import ClosedLoop, Ramp
from router.core.types import Layout

PEAK = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two engine models and a clock: engine seconds per second."""

    name: str
    title: str
    spec: str
    base: str
    clock: float = 1.0


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario(
                "h200-tree",
                "EAGLE-3 tree 2/4/16 (v1) beside plain, as measured on H200",
                spec="h200-tree-v1",
                base="h200-plain",
            ),
            Scenario(
                "h200-chain",
                "EAGLE-3 chain 3/1/4 (v2) beside plain, as measured on H200",
                spec="h200-chain-v2",
                base="h200-plain",
            ),
            Scenario(
                "field",
                "EAGLE-3 beside plain, lines through the published points of an 8-GPU node",
                spec="field-eagle",
                base="field-plain",
                clock=8.0,
            ),
        )
    }
)


def rise_and_fall(duration_s: float, peak: int = PEAK) -> ClosedLoop:
    """Return a load that ramps from 1 to `peak` requests in flight and back within the duration."""
    points = ((0.0, 1.0), (duration_s / 2, float(peak)), (duration_s, 1.0))
    return ClosedLoop(Ramp(points), duration_s=duration_s)


def routed_policy(layout: Layout) -> str:
    """Return the fixed policy that suits a layout: both servers at once, or one at a time."""
    return "split" if layout is Layout.DISJOINT else "threshold"
