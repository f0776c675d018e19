"""The simulator's figure: learnt steering and its rivals over the load, against the best split."""

from collections.abc import Sequence
from pathlib import Path

from loadtest.plots import new_figure, save
from loadtest.virtual.arms import BASE_ONLY, LEAST, SPEC_ONLY, SPLIT, CaseResult
from loadtest.virtual.demands import COLD

_LINES = (
    (COLD, "routed, from nothing", "#1b9e3f", 2.4),
    (LEAST, "least-inflight", "#7f7f7f", 1.4),
    (SPEC_ONLY, "spec only", "#d95f02", 1.2),
    (BASE_ONLY, "base only", "#1f78b4", 1.2),
)

# Fewer levels make no line.
LEVELS_MIN = 4


def draw(results: Sequence[CaseResult], out: Path) -> list[Path]:
    """Draw all scenarios that hold enough levels on disjoint GPUs; nothing if there is none."""
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.case.level is not None and SPLIT in result.arms and COLD in result.arms:
            groups.setdefault(result.case.scenario.name, []).append(result)
    groups = {n: g for n, g in groups.items() if len({r.case.level for r in g}) >= LEVELS_MIN}
    if not groups:
        return []
    figure = new_figure(4.2 * len(groups), 3.4)
    for place, (name, group) in enumerate(groups.items(), 1):
        axes = figure.add_subplot(1, len(groups), place)
        levels = sorted({result.case.level for result in group if result.case.level is not None})
        for arm, label, colour, width in _LINES:
            worst = [
                min(
                    r.tokens(arm) / r.tokens(SPLIT)
                    for r in group
                    if r.case.level == level and arm in r.arms
                )
                for level in levels
            ]
            axes.plot(levels, worst, label=label, color=colour, linewidth=width, marker=".")
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set_xscale("log", base=2)
        axes.set(title=f"{name}, simulated", xlabel="requests in flight", ylim=(0.3, 1.2))
        axes.grid(alpha=0.25)
        if place == 1:
            axes.set(ylabel="tokens / best split, worst seed")
            axes.legend(frameon=False, fontsize=8)
    return save(figure, out, "sim")
