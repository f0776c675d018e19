"""A sweep's results as Markdown. Pure: results in, text out."""

from collections.abc import Mapping, Sequence
from typing import Any

_TABLES = (
    ("Throughput, tok/s", "tok_s", None),
    ("Speed of one request after its first token, tok/s", "request_tok_s", None),
    ("Time to first token, ms", "ttft_ms", ("p50", "p99")),
    ("Inter-token latency, ms", "itl_ms", ("p50", "p99")),
    ("End to end, ms", "e2e_ms", ("p50", "p99")),
)


def runs_of(found: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the runs of a results document."""
    runs: Mapping[str, Mapping[str, Any]] = found["runs"]
    return runs


def markdown(found: Mapping[str, Any]) -> str:
    """Return the report: what was measured, the findings, what is doubtful, the tables."""
    parts = [f"# Sweep of {found['setting']['model']}", _origin(found), _findings(found)]
    if found["warnings"]:
        parts.append("\n".join(f"- Warning: {text}." for text in found["warnings"]))
    targets = {run["target"] for run in runs_of(found).values()}
    ordered = [name for name in found["setting"]["targets"] if name in targets]
    for title, key, shares in _TABLES:
        parts.append(f"## {title}\n\n{_figures(found, ordered, key, shares)}")
    if "step" in found:
        parts.append(_step(found["step"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(found: Mapping[str, Any]) -> str:
    setting, made = found["setting"], found["provenance"]
    host = made["host"]
    commit = f"Commit {made['commit'][:12]}" if made["commit"] else "No git checkout"
    dirty = ", with changes" if made["dirty"] else ""
    gpus = ", ".join(host["gpus"] or []) or "no GPU here"
    load = (
        f"Closed loop, {setting['prompt_tokens']} tokens in, {setting['output_tokens']} out "
        f"(mean); {setting['rounds']} interleaved rounds of {setting['seconds']:g} s after "
        f"{setting['warmup_s']:g} s of warm-up, which is not counted. Cells are medians of the "
        f"rounds, with the lowest and the highest."
    )
    place = (
        f"{commit}{dirty}; client on {host['cpu']}, {host['cores']} cores; {gpus}; "
        f"seed {made['seed']}."
    )
    lines = [load, place]
    lines += [f"- {name}: {_server(told)}" for name, told in made.get("servers", {}).items()]
    if simulated(found):
        lines.insert(0, f"**Simulated servers**, clock x{made['clock']:g}; times are engine time.")
    return "\n".join(lines)


def simulated(found: Mapping[str, Any]) -> bool:
    """Return whether a server said that it is simulated."""
    servers = found["provenance"].get("servers", {})
    return any("simulation" in told for told in servers.values())


def _server(told: Mapping[str, Any]) -> str:
    if "problem" in told:
        return str(told["problem"])
    if told.get("policy"):
        return f"Crossover {told.get('version')}, policy {told['policy'].get('name')}, " + str(
            told.get("layout")
        )
    if "simulation" in told:
        model = told["simulation"]
        drawn = " (interpolated)" if model.get("interpolated") else ""
        return f"simulated {model.get('engine')}{drawn}"
    algorithm = told.get("speculative_algorithm")
    version = told.get("version")
    return f"SGLang {version}, " + (f"{algorithm}" if algorithm else "no speculation")


def _findings(found: Mapping[str, Any]) -> str:
    lines = []
    if found["crossover"] is not None:
        lines.append(f"**{found['crossover']['sentence']}**")
    for name, ratios in found["against_better"].items():
        if ratios:
            level, worst = min(ratios.items(), key=lambda item: item[1])
            lines.append(
                f"{name} makes {worst:.3f} to {max(ratios.values()):.3f} times the tokens of the "
                f"better of spec and base at the same level; least at {level}."
            )
    drift = found["drift"]
    if drift["moved_share"] is not None:
        lines.append(
            f"Drift check: {drift['target']} at {drift['concurrency']} was measured "
            f"{len(drift['tok_s'])} times; the rates lie {drift['moved_share']:.1%} apart."
        )
    return "\n".join(lines)


def _figures(
    found: Mapping[str, Any], targets: Sequence[str], key: str, shares: tuple[str, ...] | None
) -> str:
    runs = runs_of(found)
    heads = [f"{t} {share}" if share else t for t in targets for share in shares or ("",)]
    rows = [["requests in flight", *heads]]
    for level in found["setting"]["levels"]:
        cells = []
        for target in targets:
            run = runs.get(f"{target}@{level}", {"spread": {}})
            for share in shares or (None,):
                value, ends = run.get(key), run["spread"].get(key)
                if share is not None:
                    value, ends = (value or {}).get(share), (ends or {}).get(share)
                cells.append(cell(value, ends))
        rows.append([str(level), *cells])
    return table(rows)


def cell(value: float | None, ends: Sequence[float] | None) -> str:
    """Return a figure with its spread."""
    if value is None:
        return "-"
    if not ends or ends[0] == ends[1]:
        return short(value)
    return f"{short(value)} ({short(ends[0])} to {short(ends[1])})"


def short(value: float) -> str:
    """Return a figure with the digits that a reader wants."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head, the first column its names."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def _step(step: Mapping[str, Any]) -> str:
    levels = ", ".join(f"{level:g} at {at_s:g} s" for at_s, level in step["points"])
    moved = ", ".join(f"{at_s:.1f}" for at_s in step["mode_switches_s"]) or "never"
    return (
        f"## Step run of {step['target']}\n\nRequests in flight: {levels}. "
        f"{step['tokens']} tokens, {step['tok_s']} tok/s, {step['errors']} failed; the server that "
        f"gets most new requests changed at (s): {moved}."
    )
