"""Draws the picture from results: throughput over levels, and the step run over time.

python -m tests.gpu.draw RESULTS.json docs/results/stock-tree
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest import crossing
from tests.gpu import picture

COLOURS = {picture.SPEC: "#d95f02", picture.BASE: "#1f78b4", picture.ROUTED: "#1b9e3f"}
SERVER_COLOURS = {"spec": COLOURS[picture.SPEC], "base": COLOURS[picture.BASE]}
OTHER = "#7f7f7f"
NOTE = "dummy weights; accept length simulated"


def draw_levels(results: Mapping[str, Any], axes: Sequence[Any]) -> None:
    """Tokens per second, and a request's own speed, over the requests in flight."""
    rows = picture.steady_rows(results["rows"])
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        colour, routed = COLOURS.get(arm, OTHER), arm == picture.ROUTED
        for at, value in zip(axes, ("tok_s", "request_tok_s"), strict=True):
            middle = picture.medians_by_level(own, value)
            at.plot(
                list(middle),
                list(middle.values()),
                label=arm,
                color=colour,
                linewidth=2.4 if routed else 1.4,
                marker="o" if routed else "s",
                markersize=5,
                zorder=3 if routed else 2,
            )
            for row in own:
                at.plot(row["level"], row[value], ".", color=colour, markersize=3, alpha=0.6)
    known = picture.curves(results["rows"])
    found = crossing.find(known.get(picture.SPEC, {}), known.get(picture.BASE, {}))
    if found is not None and found.load is not None:
        axes[0].axvline(found.load, color="black", linewidth=0.8, linestyle=":")
        axes[0].annotate(f" cross at {found.load:.0f}", (found.load, 0), va="bottom", fontsize=9)
    for at, title in zip(axes, ("output tok/s", "tok/s of one request"), strict=True):
        at.set_xscale("log", base=2)
        at.set_xticks(results["levels"], [str(level) for level in results["levels"]])
        at.set(xlabel="requests in flight", ylabel=title)
        at.set_ylim(bottom=0)
        at.grid(alpha=0.25)
    axes[0].legend(frameon=False)


def draw_step(results: Mapping[str, Any], axes: Sequence[Any]) -> None:
    """Tokens per second over time, all arms; and where the routed requests were."""
    rows = [row for row in results["rows"] if row["kind"] == "step"]
    for row in rows:
        axes[0].plot(
            row["at_s"],
            smooth(row["timeline_tok_s"]),
            label=f"{row['arm']}: {row['tokens']} tokens, {row['wall_s']:.1f} s",
            color=COLOURS.get(row["arm"], OTHER),
            linewidth=2.2 if row["arm"] == picture.ROUTED else 1.3,
        )
    axes[0].set(ylabel="output tok/s")
    axes[0].legend(frameon=False, fontsize=9)
    for routed in [row for row in rows if row["arm"] == picture.ROUTED][:1]:
        busy = routed["in_flight"]
        axes[1].stackplot(
            routed["at_s"],
            *busy.values(),
            labels=list(busy),
            colors=[SERVER_COLOURS.get(name, OTHER) for name in busy],
            alpha=0.75,
        )
        axes[1].legend(frameon=False)
    axes[1].set(xlabel="seconds", ylabel="routed: in flight")
    for at in axes:
        at.set_ylim(bottom=0)
        at.margins(x=0)
        at.grid(alpha=0.25)


def smooth(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours: prefill makes the raw line jump."""
    near = (values[max(at - 1, 0) : at + 2] for at in range(len(values)))
    return [sum(window) / len(window) for window in near]


def save(figure: Figure, path: Path) -> None:
    """As PNG and as SVG, without the time in it."""
    for suffix in (".png", ".svg"):
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(path.with_name(path.name + suffix), dpi=110, metadata=metadata)


def draw(results: Mapping[str, Any], out: Path) -> None:
    """Both figures of one call, as OUT-levels and OUT-step."""
    out.parent.mkdir(parents=True, exist_ok=True)
    arms = {role: server["arm"] for role, server in results["servers"].items()}
    pair = f"{arms['spec']} and {arms['base']}, {results['provenance']['gpu'] or 'CPU'}; {NOTE}"
    for name, function, shape, size in (
        ("levels", draw_levels, (1, 2), (11, 4.6)),
        ("step", draw_step, (2, 1), (11, 6.2)),
    ):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        function(results, list(figure.subplots(*shape)))
        figure.suptitle(pair, fontsize=10)
        save(figure, out.with_name(f"{out.name}-{name}"))


def main(arguments: Sequence[str]) -> int:
    """Read a results file, write the figures."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    draw(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
