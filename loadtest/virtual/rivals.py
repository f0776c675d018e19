"""Policies that no router ships, to compare with: round robin, and steering that knows it all."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from loadtest.virtual.curves import KNOWN_MAX, Curve
from router.core.types import Decision, Reason, RequestShape, Role, ServerLoad


class RoundRobin:
    """Servers in turn, whatever they are."""

    name = "round-robin"
    mode: Role | None = None
    switches = 0

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self,
        shape: RequestShape,  # noqa: ARG002
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Decision:
        """Return the next candidate."""
        self._turn += 1
        return Decision(candidates[self._turn % len(candidates)].name, Reason.FIXED)


class KnownCurves:
    """To the server where the summed time per token grows least, by the true curves.

    `phases` are the curves by server name from each time on, in order; the first begins at 0. Rates
    are made concave first: where a curve dents, a step along it says nothing of what comes next.
    """

    name = "known-curves"
    mode: Role | None = None
    switches = 0

    def __init__(self, phases: Sequence[tuple[float, Mapping[str, Curve]]]) -> None:
        self._starts_s = [start_s for start_s, _ in phases]
        self._growth = [
            {name: summed_growth_s(curve) for name, curve in curves.items()} for _, curves in phases
        ]

    def choose(
        self,
        shape: RequestShape,  # noqa: ARG002
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],  # noqa: ARG002
        now: float,
    ) -> Decision:
        """Return the candidate with the least growth."""
        growth = self._growth[max(bisect_right(self._starts_s, now) - 1, 0)]
        chosen = min(
            candidates, key=lambda load: growth[load.name][min(load.sequences, KNOWN_MAX - 1)]
        )
        return Decision(chosen.name, Reason.FIXED)


def summed_growth_s(curve: Curve) -> list[float]:
    """Return by how much one more request lengthens the sum of all times per token, at each n."""
    rates = concave(curve.table_tok_s)
    summed_s = [n * n / rate if n else 0.0 for n, rate in enumerate(rates)]
    return [after - before for before, after in pairwise(summed_s)]


def concave(rates: Sequence[float]) -> list[float]:
    """Return the least concave function above `rates`, which begin with 0 at no requests."""
    corners: list[int] = []
    for n, rate in enumerate(rates):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (rates[b] - rates[a]) * (n - b) > (rate - rates[b]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    hull = [0.0] * len(rates)
    for a, b in pairwise(corners):
        for n in range(a, b + 1):
            hull[n] = rates[a] + (rates[b] - rates[a]) * (n - a) / (b - a)
    return hull
