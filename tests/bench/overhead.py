"""Router CPU per request and per chunk, side by side with sglang-router in one run.

    make bench-overhead ARGS="--rounds 6"

The harness (both stub engines and the client, one C process) is pinned to core 0, each router to
core 1, so every router is a one-core router. Rounds are interleaved; CPU is user plus system time
of its processes. Absolute figures are the machine's: the ratio within a round is the result,
its median the judgement. A round in which a router got too little CPU to be counted is dropped.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.rig import Harness, Peer, RigError, Router, installed, rig

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
OURS, RIVAL = "crossover", "sglang-router"
RIVAL_VERSION = "0.3.2"
CPU_MS_MIN = 200
QUIET_SHARE = 0.1  # of the router's core taken by others
ENDLESS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Test:
    """One load, what it counts, and the ratio to sglang-router that is asked for."""

    name: str
    what: str
    unit: str
    goal: float | None
    settings: dict[str, Any]


TESTS = (
    Test(
        "ns64",
        "plain request, 64 connections",
        "requests",
        1.0,
        {"mode": "plain", "conns": 64, "seconds": 2, "warm": 0.6},
    ),
    Test(
        "s16",
        "streamed request of one chunk, 16 connections",
        "requests",
        0.65,
        {"mode": "stream", "conns": 16, "tokens": 1, "seconds": 8, "warm": 0.5},
    ),
    Test(
        "lock200",
        "chunk, 200 streams in lockstep",
        "chunks",
        1.0,
        {"mode": "lock", "conns": 200, "tokens": ENDLESS, "seconds": 2, "warm": 1},
    ),
    Test(
        "p32",
        "chunk, 32 streams at 20 ms",
        "chunks",
        None,
        {"mode": "stream", "conns": 32, "tokens": 50, "ttft_ms": 60, "itl_ms": 20, "seconds": 3}
        | {"warm": 0.5},
    ),
    Test(
        "hold1000",
        "memory with 1,000 streams open",
        "rss",
        0.6,
        {"mode": "stream", "conns": 1000, "tokens": ENDLESS, "ttft_ms": 20, "itl_ms": 500}
        | {"seconds": 1, "warm": 4},
    ),
)

Row = dict[str, Any]


def peers(cache: Path) -> list[Peer]:
    """The two routers, each with its defaults but for addresses and, there, a quiet log."""
    python = installed(cache / f"sglang-router-{RIVAL_VERSION}", f"sglang-router=={RIVAL_VERSION}")
    address = ("--host", "127.0.0.1", "--port", "{port}")
    ours = (sys.executable, "-m", "router", "serve", *address)
    rival = (str(python), "-m", "sglang_router.launch_router", *address)
    return [
        Peer(OURS, (*ours, "--spec-url", "{first}", "--base-url", "{second}")),
        Peer(
            RIVAL,
            (
                *(*rival, "--worker-urls", "{first}", "{second}", "--policy", "power_of_two"),
                *("--prometheus-port", "{free}", "--log-level", "warn"),
                *("--max-concurrent-requests", "-1"),
            ),
        ),
    ]


def run_rounds(
    harness: Harness, routers: Sequence[Router], tests: Sequence[Test], rounds: int
) -> list[Row]:
    """Every test against every router, the routers in turning order."""
    rows = []
    for number in range(rounds):
        for router in routers if number % 2 == 0 else routers[::-1]:
            for test in tests:
                row = harness.run(router.port, router.pids, test.settings)
                rows.append({"round": number, "test": test.name, "peer": router.peer.name, **row})
                router.settle()
        print(f"round {number + 1} of {rounds}", flush=True)
    return rows


def cost(row: Row, test: Test) -> float | None:
    """Microseconds of CPU per unit, or MB; None where too little was measured."""
    if test.unit == "rss":
        return row["rss_mb"]
    counted = row["chunks"] if test.unit == "chunks" else row["requests"]
    enough = CPU_MS_MIN if test.goal is not None else 0
    if not counted or row["cpu_ms"] < enough:
        return None
    return row["cpu_ms"] * 1e3 / counted


def compare(rows: Sequence[Row], test: Test) -> dict[str, Any]:
    """Costs of both routers and their ratio by round."""
    costs: dict[str, dict[int, float]] = {OURS: {}, RIVAL: {}}
    for row in rows:
        if row["test"] == test.name and (value := cost(row, test)) is not None:
            costs[row["peer"]][row["round"]] = value
    pairs = [costs[OURS][one] / costs[RIVAL][one] for one in costs[OURS] if one in costs[RIVAL]]
    latency = {
        name: {
            series: statistics.median(values)
            for series in ("first_us", "chunk_us", "reply_us")
            if (
                values := [
                    row[series]["p50"]
                    for row in rows
                    if row["test"] == test.name and row["peer"] == name and row[series]
                ]
            )
        }
        for name in costs
    }
    return {
        "test": test.name,
        "what": test.what,
        "unit": "MB" if test.unit == "rss" else "us CPU",
        "goal": test.goal,
        **{name: _spread(list(values.values())) for name, values in costs.items()},
        "ratio": _spread(pairs),
        "rounds": len(pairs),
        "latency_p50_us": latency,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


def summary(rows: Sequence[Row], tests: Sequence[Test], noise: float) -> str:
    """The table, as Markdown."""
    lines = [
        f"| what | {OURS} | {RIVAL} | ratio (low..high), rounds | goal |",
        "|---|---|---|---|---|",
    ]
    for test in tests:
        one = compare(rows, test)
        ours, rival, ratio = one[OURS], one[RIVAL], one["ratio"]
        shown = (
            f"{ratio['median']:.2f} ({ratio['low']:.2f}..{ratio['high']:.2f}), {one['rounds']}"
            if ratio
            else "-"
        )
        cells = [f"{cell['median']:.1f}" if cell else "-" for cell in (ours, rival)]
        goal = "-" if test.goal is None else f"<= {test.goal:.2f}"
        lines.append(f"| {test.what}, {one['unit']} | {' | '.join(cells)} | {shown} | {goal} |")
        for series in ("first_us", "chunk_us"):
            mine, theirs = (one["latency_p50_us"][name].get(series) for name in (OURS, RIVAL))
            if mine is not None and theirs is not None and test.name in ("s16", "p32"):
                word = "first chunk" if series == "first_us" else "chunk"
                lines.append(
                    f"| {test.name}: {word} over the wire, p50 us | {mine:.0f} | {theirs:.0f} | | |"
                )
    state = "quiet" if noise <= QUIET_SHARE else "NOT quiet: run it again"
    lines.append(f"\nOthers took {noise:.0%} of the router's core (median of the runs): {state}.")
    return "\n".join(lines)


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, on what, by which command."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": commit.stdout.strip() or None,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rounds": options.rounds,
        "tests": options.tests,
        "cpu": cpu[0] if cpu else None,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "rival": f"{RIVAL} {RIVAL_VERSION}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0 when every reply was right, 1 when not, 2 when it cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tests", default=",".join(test.name for test in TESTS))
    parser.add_argument("--json", type=Path, default=RESULTS / "overhead.json")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache/bench")
    options = parser.parse_args(arguments)
    tests = [test for test in TESTS if test.name in options.tests.split(",")]
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        try:
            with rig(peers(options.cache), Path(folder)) as (harness, routers):
                rows = run_rounds(harness, routers, tests, options.rounds)
        except RigError as error:
            print(error, file=sys.stderr)
            return 2
    noise = statistics.median(row["foreign_share"] for row in rows)
    results = {
        "schema": 1,
        "provenance": provenance(options),
        "foreign_share_median": noise,
        "comparisons": [compare(rows, test) for test in tests],
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(summary(rows, tests, noise))
    wrong = {
        peer: sum(row["errors"] for row in rows if row["peer"] == peer) for peer in (OURS, RIVAL)
    }
    print(f"wrong replies: {wrong}; results: {options.json}")
    return 1 if wrong[OURS] else 0


if __name__ == "__main__":
    raise SystemExit(main())
