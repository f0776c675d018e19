"""A sweep's figures, from its results alone: drawn without a display, as PNG and SVG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from loadtest.plots import SERVER_COLOURS, new_figure, save
from loadtest.report import runs_of, simulated

_COLOURS = SERVER_COLOURS | {"router": "#1b9e3f"}
_OTHERS = ("#1b9e3f", "#7570b3", "#e7298a", "#66a61e", "#7f7f7f")


def draw(found: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw speed and latencies over concurrency, and the step run if there is one."""
    paths = _speed(found, out) + _latency(found, out)
    return paths + (_step(found, out) if "step" in found else [])


def _colour(found: Mapping[str, Any], target: str) -> str:
    others = [t for t in found["setting"]["targets"] if t not in _COLOURS]
    return _COLOURS.get(target) or _OTHERS[others.index(target) % len(_OTHERS)]


def _speed(found: Mapping[str, Any], out: Path) -> list[Path]:
    figure = new_figure(11, 5)
    whole, one = figure.subplots(1, 2)
    for axes, key, label in (
        (whole, "tok_s", "output tokens per second"),
        (one, "request_tok_s", "tokens per second of one request"),
    ):
        _curves(axes, found, key, None)
        _mark_crossover(axes, found)
        axes.set(ylabel=label)
        axes.legend(frameon=False)
    figure.suptitle(_title(found, "speed"))
    return save(figure, out, "speed")


def _latency(found: Mapping[str, Any], out: Path) -> list[Path]:
    figure = new_figure(11, 5)
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("ttft_ms", "itl_ms"),
        ("time to first token, ms", "inter-token latency, ms"),
        strict=True,
    ):
        for share, style in (("p50", "-"), ("p99", "--")):
            _curves(axes, found, key, share, style)
        axes.set(ylabel=label + " (dashed: p99)", yscale="log")
        axes.legend(frameon=False)
    figure.suptitle(_title(found, "latency"))
    return save(figure, out, "latency")


def _curves(
    axes: Any, found: Mapping[str, Any], key: str, share: str | None, style: str = "-"
) -> None:
    """Draw a curve with its spread for each target; others than spec and base go on top."""
    for target in found["setting"]["targets"]:
        points = []
        for run in runs_of(found).values():
            value, ends = run[key], run["spread"][key]
            if share is not None:
                value, ends = value[share], ends[share]
            if run["target"] == target and value is not None:
                points.append((run["concurrency"], value, *ends))
        if not points:
            continue
        levels, values, lows, highs = zip(*sorted(points), strict=True)
        colour, on_top = _colour(found, target), target not in SERVER_COLOURS
        axes.fill_between(levels, lows, highs, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            levels,
            values,
            style,
            color=colour,
            label=target if share in (None, "p50") else None,
            marker="o",
            markersize=3.5,
            linewidth=2.4 if on_top else 1.5,
            zorder=3 if on_top else 2,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda level, _: f"{level:g}"))
    axes.set(xlabel="requests in flight")
    axes.grid(alpha=0.25)
    if share is None:
        axes.set_ylim(bottom=0)


def _mark_crossover(axes: Any, found: Mapping[str, Any]) -> None:
    load = (found["crossover"] or {}).get("load")
    if load is not None:
        axes.axvline(load, color="black", linewidth=0.9, linestyle=":")
        axes.annotate(
            f"crossover {load:.3g}",
            (load, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
        )


def _step(found: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the step run: its rate, and below which server had how many, if the target tells."""
    step = found["step"]
    line = step["timeline"]
    names = list(line["in_flight"])
    figure = new_figure(11, 6 if names else 3.5)
    speed, *rest = figure.subplots(2 if names else 1, 1, sharex=True, squeeze=False)[:, 0]
    speed.plot(line["at_s"], line["tok_s"], color=_colour(found, step["target"]))
    speed.set(ylabel="output tokens per second")
    speed.set_ylim(bottom=0)
    load = speed.twinx()
    load.fill_between(line["at_s"], line["wanted"], color="black", alpha=0.06, linewidth=0)
    load.set(ylabel="requests in flight wanted (grey)")
    load.set_ylim(bottom=0)
    for servers in rest:
        colours = [SERVER_COLOURS.get(name) for name in names]
        shares = [line["in_flight"][name] for name in names]
        servers.stackplot(line["at_s"], *shares, labels=names, colors=colours, alpha=0.75)
        servers.legend(loc="upper left", frameon=False)
        servers.set(ylabel="in flight at each server")
    for axes in (speed, *rest):
        axes.margins(x=0)
        axes.grid(alpha=0.25)
        for at_s in step["mode_switches_s"]:
            axes.axvline(at_s, color="black", linewidth=0.9, linestyle=":")
    (speed, *rest)[-1].set(xlabel="seconds")
    figure.suptitle(_title(found, f"step run of {step['target']}, dotted: mode switches"))
    return save(figure, out, "step")


def _title(found: Mapping[str, Any], what: str) -> str:
    title = f"{found['setting']['model']}: {what}"
    return title + (", simulated servers" if simulated(found) else "")
