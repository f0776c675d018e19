"""How figures are made and kept, and the demo's, from its results alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = {
    "spec-only": "#d95f02",
    "base-only": "#1f78b4",
    "least-inflight": "#7f7f7f",
    "routed": "#1b9e3f",
}
SERVER_COLOURS = {"spec": "#d95f02", "base": "#1f78b4"}


def draw_demo(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw throughput over time, where the routed requests went, and the totals beside rivals."""
    figure = new_figure(11, 7.5)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), width_ratios=(3, 2))
    _throughput(figure.add_subplot(grid[0, :]), results)
    _in_flight(figure.add_subplot(grid[1, 0]), results)
    _totals(figure.add_subplot(grid[1, 1]), results)
    figure.suptitle(_title(results["scenario"]))
    return save(figure, out, "demo")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no display; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write the figure as PNG and SVG, the same bytes for the same figure; return the paths."""
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    for path in paths:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _title(scenario: Mapping[str, Any]) -> str:
    title = f"{scenario['title']}, {scenario['layout']} GPUs, simulated engines"
    if scenario["interpolated"]:
        title += " (interpolated)"
    if scenario["clock"] != 1:
        title += f", clock x{scenario['clock']:g}"
    return title


def _throughput(axes: Any, results: Mapping[str, Any]) -> None:
    for name, run in results["runs"].items():
        line = run["timeline"]
        axes.plot(
            line["at_s"],
            _smooth(line["tok_s"]),
            label=name,
            color=_COLOURS.get(name),
            linewidth=2.4 if name == "routed" else 1.4,
        )
    axes.set(xlabel="seconds of engine time", ylabel="output tokens per second")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    load = axes.twinx()
    first = next(iter(results["runs"].values()))["timeline"]
    load.fill_between(first["at_s"], first["wanted"], color="black", alpha=0.06, linewidth=0)
    load.set(ylabel="requests in flight wanted (grey)")
    load.set_ylim(bottom=0)
    load.margins(x=0)
    axes.legend(loc="upper left", frameon=False)
    axes.grid(alpha=0.25)


def _smooth(values: list[float]) -> list[float]:
    """Return each value's mean with its neighbours: prefill passes make the raw line jump."""
    near = (values[max(i - 1, 0) : i + 2] for i in range(len(values)))
    return [sum(window) / len(window) for window in near]


def _in_flight(axes: Any, results: Mapping[str, Any]) -> None:
    line = results["runs"]["routed"]["timeline"]
    names = list(line["in_flight"])
    if names:
        axes.stackplot(
            line["at_s"],
            *(line["in_flight"][name] for name in names),
            labels=names,
            colors=[SERVER_COLOURS.get(name) for name in names],
            alpha=0.75,
        )
        axes.legend(loc="upper left", frameon=False)
    axes.set(
        xlabel="seconds of engine time", ylabel="in flight", title="routed: requests at each server"
    )
    axes.margins(x=0)


def _totals(axes: Any, results: Mapping[str, Any]) -> None:
    runs = {name: run["tok_s"] for name, run in results["runs"].items()}
    rivals = results["rivals"]
    names = [*runs, *rivals]
    bars = axes.barh(
        names,
        [*runs.values(), *rivals.values()],
        color=[_COLOURS.get(name, "#dddddd") for name in names],
        hatch=["///" if name in rivals else "" for name in names],
        edgecolor="white",
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="tok/s over the whole load (hatched: by the engine model)")
    axes.margins(x=0.18)
