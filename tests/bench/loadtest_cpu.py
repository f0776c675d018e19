"""What one client process costs: 256 streams, a token every 20 ms each, in CPU seconds.

    .venv/bin/python -m tests.bench.loadtest_cpu

The engine is a simulated one whose step takes 20 ms at any batch, in a process of its own. CPU is
what the client process says of itself, over the wall time of the run: the share of one core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.engine_params import DecodeMode, EngineParams
from loadtest.provenance import provenance
from loadtest.sim_server import MODEL_NAME

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "loadtest_cpu.json"
GOAL_SHARE = 0.60
STEADY = EngineParams(
    name="steady",
    source="made up: the same step time at any batch",
    decode=DecodeMode(((1, 0.020), (1024, 0.020))),
    prefill_pass_s=0.001,
    prefill_token_s=0.0,
    kv_tokens=8_000_000,
)


def serve() -> None:
    """Serve the steady engine until standard input ends."""
    import asyncio

    import uvloop

    from loadtest.sim_server import EngineSpec, SimServer

    async def run() -> None:
        async with SimServer([EngineSpec("steady", STEADY)]) as server:
            print(server.urls["steady"], flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            print(server.drivers["steady"].lag.slipped_s, flush=True)

    uvloop.run(run())


def measure(url: str, streams: int, requests: int, tokens: int, out: Path) -> dict[str, object]:
    """Run the client once and return its figures."""
    command = [
        *(sys.executable, "-m", "loadtest", "run", "--url", url, "--model", MODEL_NAME),
        *("--concurrency", str(streams), "--requests", str(requests), "--prompt-tokens", "64"),
        *("--output-tokens", str(tokens), "--json", str(out)),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    found: dict[str, object] = json.loads(out.read_text())["runs"]["run"]
    return found


def main() -> int:
    """Measure and write the result; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return 0
    engine = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.loadtest_cpu", "--serve"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    try:
        url = engine.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            runs = [
                measure(url, asked.streams, 2 * asked.streams, asked.tokens, out)
                for _ in range(asked.rounds)
            ]
    finally:
        slipped, _ = engine.communicate()
    shares = [run["client"]["cpu_share_of_core"] for run in runs]
    document = {
        "schema": 1,
        "what": f"one client process, {asked.streams} streams, a token every 20 ms each",
        "goal_share_of_core": GOAL_SHARE,
        "share_of_core": statistics.median(shares),
        "met": statistics.median(shares) < GOAL_SHARE,
        "cpu_us_per_token": [round(r["client"]["cpu_s"] / r["tokens"] * 1e6, 2) for r in runs],
        "runs": [
            {
                key: run[key]
                for key in ("tokens", "tok_s", "duration_s", "errors", "itl_ms", "client")
            }
            for run in runs
        ],
        "engine_slipped_s": float(slipped or 0),
        "load_average": os.getloadavg(),
        "provenance": provenance(["python", "-m", "tests.bench.loadtest_cpu", *sys.argv[1:]], 1),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: document[key] for key in ("share_of_core", "cpu_us_per_token", "met")}))
    return 0 if document["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
