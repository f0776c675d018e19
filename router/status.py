"""`crossover status`: a running router on one screen."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import httpx

from router.core.learner import CROSSOVER_MAX
from router.curve_plot import Curve, plot
from router.kinds import Url
from router.problems import SettingsError, not_allowed
from router.security import read_key

EXIT_OK = 0
EXIT_FAILED = 1
DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 5.0

_ORACLES = {"o1": "better role alone", "o2": "best fixed rule", "o3": "best split"}
_LETTERS = {"spec": "s", "base": "b"}
_COLOURS = {"s": "\x1b[36m", "b": "\x1b[33m"}
_PLAIN = "\x1b[0m"


class StatusError(Exception):
    """No status. The text is for the user."""


def main(arguments: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command. `parser` raises SettingsError on what it does not know."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router ({DEFAULT_URL})")
    parser.add_argument(
        "--key-file", metavar="FILE", help="file with a client key, or the admin key"
    )
    parser.add_argument("--json", action="store_true", help="print what the router told, as JSON")
    options = parser.parse_args(arguments)
    try:
        url = Url().from_text(options.url)
    except ValueError:
        raise SettingsError([not_allowed("flag --url", options.url, Url().allowed)]) from None
    problems: list[str] = []
    path = options.key_file
    key = None if path is None else read_key(path, "flag --key-file", problems)
    if problems:
        raise SettingsError(problems)
    try:
        told = fetch(url, key)
        text = json.dumps(told, indent=2) if options.json else screen(url, told)
    except StatusError as error:
        print(f"crossover: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(text if options.json else coloured(text, sys.stdout, os.environ))
    return EXIT_OK


def fetch(url: str, key: str | None = None) -> dict[str, Any]:
    """Ask a router for its state, its model and its latest decisions."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=headers) as client:
        return {name: _get(client, name) for name in ("state", "model", "decisions")}


def _get(client: httpx.Client, name: str) -> Any:
    where = f"{str(client.base_url).rstrip('/')}/crossover/{name}"
    try:
        answer = client.get(f"/crossover/{name}")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise StatusError(f"{where}: it asks for a key: name a file with one by --key-file")
        if answer.status_code != httpx.codes.OK:
            raise StatusError(f"{where}: HTTP {answer.status_code}: is it a router?")
        return answer.json()
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise StatusError(f"{where}: cannot be reached: {reason}") from None
    except ValueError:
        raise StatusError(f"{where}: not JSON: is it a router?") from None


def screen(url: str, told: Mapping[str, Any]) -> str:
    """Return the screen, without colours. StatusError if it was no router that told."""
    try:
        return "\n".join(_lines(url, told["state"], told["model"], told["decisions"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StatusError(
            f"{url}: an answer that this version does not know ({error!r}): is it a router?"
        ) from None


def coloured(text: str, stream: TextIO, environ: Mapping[str, str]) -> str:
    """Colour the curves' letters in the plot if `stream` is a terminal that may have colours."""
    if not stream.isatty() or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return text
    lines = []
    for line in text.splitlines():
        head, bar, cells = line.partition(" |")
        if bar:
            cells = "".join(
                f"{_COLOURS[cell.lower()]}{cell}{_PLAIN}" if cell.lower() in _COLOURS else cell
                for cell in cells
            )
        lines.append(head + bar + cells)
    return "\n".join(lines)


def _lines(
    url: str, state: Mapping[str, Any], model: Mapping[str, Any], decisions: Mapping[str, Any]
) -> list[str]:
    policy = state["policy"]
    rules = f"policy {policy['name']} ({policy['objective']}), layout {state['layout']}"
    lines = [
        f"crossover {state['version']} at {url}: {rules}",
        *_exceptions(state),
        _crossover(model["crossover"]),
        "",
        *_table(state["servers"], model["servers"]),
        "",
    ]
    drawn = plot([_curve(server, model["servers"]) for server in state["servers"]])
    if drawn:
        lines += ["  tok/s of one sequence", *drawn]
        lines += [f"{'':10}sequences in flight; s spec, b base, * both, capitals: now", ""]
    else:
        lines += ["nothing is measured yet: no curves", ""]
    lines.append(_regret(model["regret"]))
    reasons = Counter(each["reason"] for each in decisions["decisions"])
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    lines.append(f"latest {sum(reasons.values())} decisions: {counts or 'none'}")
    warnings = [*state["parity_warnings"], *filter(None, [state["layout_warning"]])]
    return [*lines, *(f"warning: {warning}" for warning in warnings)]


def _exceptions(state: Mapping[str, Any]) -> list[str]:
    """Say what an operator has put in place of the settings, or that the end is near."""
    lines = []
    override, configured = state["policy"]["override"], state["policy"]["configured"]
    if override is not None:
        at = "" if override["threshold"] is None else f" at {override['threshold']}"
        minutes = override["remaining_s"] / 60
        lines.append(f"override: this policy{at} for {minutes:.1f} min more, then {configured}")
    if not state["settings_latest"]:
        lines.append("settings: the ones that were read last are wrong, see the log")
    if state["stage"] != "serving":
        lines.append(f"stage: {state['stage']}, new requests are refused")
    return lines


def _crossover(load: int | None) -> str:
    if load is None:
        return "crossover: not known yet"
    if load <= 1:
        return "crossover: base is faster at every load"
    if load >= CROSSOVER_MAX:
        return f"crossover: spec is faster at every load up to {CROSSOVER_MAX}"
    return f"crossover: base alone is believed faster than spec from {load} sequences on"


def _regret(shares: Mapping[str, float | None]) -> str:
    known = [(_ORACLES[name], share) for name, share in shares.items() if share is not None]
    if not known:
        return "tokens missed: not known yet"
    texts = ", ".join(f"{oracle} {share:+.1%}" for oracle, share in known)
    return f"tokens missed, of the {texts}"


def _table(servers: Sequence[Mapping[str, Any]], models: Mapping[str, Any]) -> list[str]:
    head = ("server", "role", "state", "in flight", "engine", "tok/s now", "windows", "switch")
    rows = [head, *(_row(server, models[server["name"]]) for server in servers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(server: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str, ...]:
    engine = server["engine"]
    told, switch = "-", "-"
    if engine is not None:
        usage = engine["token_usage"]
        told = f"{_or_dash(engine['running'])}+{_or_dash(engine['queued'])}"
        told += "" if usage is None else f", KV {usage:.0%}"
        if engine["switch"] is not None:
            off = engine["switch"]["off_share"]
            switch = f"{engine['switch']['state']}, {engine['switch']['mode']}"
            switch += "" if off is None else f", off {off:.0%}"
    load = _load(server) or 1
    speed = _curve(server, {server["name"]: model}).speed(load)
    return (
        server["name"],
        server["role"],
        f"{server['state']}, drained" if server["drained"] else server["state"],
        str(server["load"]["sequences"]),
        told,
        "-" if speed is None else f"{speed * load:.0f}",
        str(model["windows"]),
        switch,
    )


def _load(server: Mapping[str, Any]) -> int | None:
    return server["load"]["sequences"] or None


def _curve(server: Mapping[str, Any], models: Mapping[str, Any]) -> Curve:
    points = [
        (float(point["sequences"]), 1 / point["s"])
        for point in models[server["name"]]["tpot"]
        if point["s"] > 0
    ]
    return Curve(_LETTERS[server["role"]], points, _load(server))


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)
