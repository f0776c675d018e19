"""How much slower a server is while another works too: measured, with the layout as the prior.

A server's levels alone are compared with its levels beside another's work. At like loads their
ratio is the slowdown. At unlike ones a bound is certain, whatever the curve's shape: time per token
does not fall with load, so a server that beside another needs more at few sequences than alone at
more is slowed by at least the ratio.
"""

import math

from router.core.calibration import Interference
from router.core.performance import Curve
from router.core.types import Layout

# A window with less overlap than this shows a server alone, with more than that beside another.
ALONE_MAX = 0.05
BESIDE_MIN = 0.7
_PRIOR = {Layout.DISJOINT: 1.0, Layout.SHARED: 2.0}
# The prior counts as so many windows; its own doubt, in logarithms.
_PRIOR_WEIGHT = 2.0
_PRIOR_SIGMA = 0.1
_SURE_WEIGHT = 1.0
_SLOWDOWN_MAX = 10.0
_LOG_MAX = math.log(_SLOWDOWN_MAX)
# GPUs are shared where a slowdown of this much is certain, apart where less than that is.
SHARED_MIN = 1.25


class InterferenceEstimate:
    """The slowdown of all servers together, as one number."""

    def __init__(self, layout: Layout, given: Interference | None) -> None:
        self._prior = given.slowdown if given is not None else _PRIOR[layout]
        # Whether a server was seen alone and beside another's work at loads that can be compared.
        self.contrast_known = False

    def estimate(self, curves: list[tuple[Curve, Curve]]) -> Interference:
        """Return the slowdown by the (alone, beside) curves of all servers."""
        weight, total, noise = _PRIOR_WEIGHT, _PRIOR_WEIGHT * math.log(self._prior), 0.05
        for alone, beside in curves:
            for point in beside.points():
                evidence = min(point.weight, alone.weight(point.sequences))
                if evidence >= _SURE_WEIGHT / 2:
                    ratio = point.seconds / alone.seconds(point.sequences)
                    weight += evidence
                    total += evidence * math.log(ratio)
                    noise = max(noise, alone.noise, beside.noise)
        certain = self._certain(curves)
        self.contrast_known = certain > 0 or weight > _PRIOR_WEIGHT
        mean = min(max(total / weight, -_LOG_MAX), _LOG_MAX)
        sigma = math.hypot(_PRIOR_SIGMA * _PRIOR_WEIGHT / weight, 2 * noise / math.sqrt(weight))
        low = max(math.exp(mean - 1.96 * sigma), certain)
        low = min(low, _SLOWDOWN_MAX)
        value = max(math.exp(mean), low)
        return Interference(value, low, max(value, math.exp(mean + 1.96 * sigma)))

    def _certain(self, curves: list[tuple[Curve, Curve]]) -> float:
        """Return the greatest slowdown that no curve could explain, 0 if there is none."""
        certain = 0.0
        for alone, beside in curves:
            for b in beside.points():
                for a in alone.points():
                    if a.sequences < b.sequences or min(a.weight, b.weight) < _SURE_WEIGHT:
                        continue
                    noise = math.hypot(
                        alone.noise / math.sqrt(a.weight), beside.noise / math.sqrt(b.weight)
                    )
                    certain = max(certain, b.seconds / a.seconds * math.exp(-3 * noise))
        return certain
