"""crossover-loadtest and SGLang's bench_serving on one simulated engine, in turns.

    .venv/bin/python -m tests.bench.loadtest_peer

Both send the same prompts from one file in a closed loop of the same concurrency. The engine runs
slower than its model (--clock), so that a busy machine shifts the figures little. Throughput, TTFT
and inter-token latency are medians over rounds of each client's own figures. Outputs are half to
one and a half of --output-tokens; --lockstep makes them equal, so that all requests end and start
together and a client that is slow to start the next ones slows the run down. CPU per request is
that of the whole client process, less what a run of one wave took, over the requests between, so
that start-up does not count; bench_serving's includes that it tokenizes every answer at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.children import free_port
from loadtest.provenance import provenance
from loadtest.sim_server import MODEL_NAME
from loadtest.workload import Drawn, Uniform, Workload

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
ENGINE_PYTHON = ROOT / ".venv-engine/bin/python"
AGREE_WITHIN = 0.03
OURS, PEER = "crossover-loadtest", "bench_serving"
FIGURES = ("tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_mean_ms")


@dataclass(frozen=True, slots=True)
class Plan:
    """What every run of either client does."""

    folder: Path
    url: str
    concurrency: int
    requests: int


def write_prompts(path: Path, count: int, prompt_tokens: int, output: Uniform) -> None:
    """Write chat prompts as OpenAI requests, one a line."""
    workload = Workload("", Drawn(Uniform(prompt_tokens, prompt_tokens), output), seed=1)
    with path.open("w") as file:
        for index in range(count):
            ask = workload.ask(index)
            message = {"role": "user", "content": workload.prompt(ask)}
            line = {"messages": [message], "max_tokens": ask.output_tokens}
            file.write(json.dumps(line) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, which bench_serving will not do without."""
    words = ["<unk>", *(chr(code) for code in range(32, 127))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    splitter = {"type": "Whitespace"}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model}
        )
    )
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template, "model_max_length": 8192})
    )


def run_child(command: Sequence[str], log: Path, path: Sequence[str]) -> float:
    """Run a client to its end; return the CPU seconds of its process and its children."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=environment
        )
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            raise
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{command[0]} failed ({child.returncode}):\n{log.read_text()[-2000:]}")
    return used.ru_utime + used.ru_stime


def ours(plan: Plan, requests: int) -> dict[str, float]:
    """Run crossover-loadtest and return its figures."""
    out, rows = plan.folder / "ours.json", plan.folder / "ours.jsonl"
    command = [
        *(sys.executable, "-m", "loadtest", "run", "--url", plan.url, "--model", MODEL_NAME),
        *("--prompts", str(plan.folder / "prompts.jsonl"), "--requests", str(requests)),
        *("--concurrency", str(plan.concurrency), "--json", str(out), "--rows", str(rows)),
    ]
    cpu_s = run_child(command, plan.folder / "ours.log", [str(ROOT)])
    figures = json.loads(out.read_text())["runs"]["run"]
    every = [json.loads(line) for line in rows.read_text().splitlines()]
    gaps = [gap for row in every if not row["warmup"] for gap in row["gaps_s"]]
    return {
        "requests": figures["finished"],
        "tokens": figures["tokens"],
        "tok_s": figures["tok_s"],
        "ttft_p50_ms": figures["ttft_ms"]["p50"],
        "itl_p50_ms": figures["itl_ms"]["p50"],
        "itl_mean_ms": statistics.fmean(gaps) * 1e3,
        "cpu_s": cpu_s,
        "lag_p99_ms": figures["client"]["lag_ms"]["p99"],
        "valid": figures["valid"],
    }


def peer(plan: Plan, requests: int) -> dict[str, float]:
    """Run bench_serving and return its figures."""
    out = plan.folder / "peer.jsonl"
    out.unlink(missing_ok=True)
    command = [
        *(str(ENGINE_PYTHON), "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", plan.url, "--model", MODEL_NAME),
        *("--tokenizer", str(plan.folder / "tokenizer"), "--dataset-name", "openai"),
        *("--dataset-path", str(plan.folder / "prompts.jsonl"), "--num-prompts", str(requests)),
        *("--max-concurrency", str(plan.concurrency), "--output-file", str(out)),
        *("--warmup-requests", "1", "--disable-tqdm"),
    ]
    # The engine environment has neither torchvision, for which tests/engine/cpu stands in, nor
    # datasets, which bench_serving imports and does not use here.
    path = [str(ROOT / "tests/engine/cpu"), str(plan.folder / "stubs")]
    cpu_s = run_child(command, plan.folder / "peer.log", path)
    found = json.loads(out.read_text().splitlines()[-1])
    return {
        "requests": found["completed"],
        "tokens": found["total_output_tokens"],
        "tok_s": found["output_throughput"],
        "ttft_p50_ms": found["median_ttft_ms"],
        "itl_p50_ms": found["median_itl_ms"],
        "itl_mean_ms": found["mean_itl_ms"],
        "cpu_s": cpu_s,
    }


def compare(plan: Plan, rounds: int) -> dict[str, Any]:
    """Run both clients in turns and return medians, ratios and CPU per request."""
    clients = {OURS: ours, PEER: peer}
    found: dict[str, list[dict[str, float]]] = {OURS: [], PEER: []}
    for number in range(rounds):
        order = [OURS, PEER] if number % 2 == 0 else [PEER, OURS]
        for name in order:
            found[name].append(clients[name](plan, plan.requests))
            print(number + 1, name, found[name][-1], flush=True)
    few = {name: run(plan, plan.concurrency)["cpu_s"] for name, run in clients.items()}
    medians = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
        for name, runs in found.items()
    }
    ratios = {figure: medians[OURS][figure] / medians[PEER][figure] for figure in FIGURES}
    more = plan.requests - plan.concurrency
    return {
        "medians": medians,
        "ours_over_peer": {figure: round(ratio, 4) for figure, ratio in ratios.items()},
        "agree_within": AGREE_WITHIN,
        "agree": all(abs(ratio - 1) <= AGREE_WITHIN for ratio in ratios.values()),
        "client_cpu_ms_per_request": {
            name: round(
                (statistics.median(run["cpu_s"] for run in runs) - few[name]) / more * 1e3, 3
            )
            for name, runs in found.items()
        },
        "rounds": found,
    }


def _version() -> str:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    return subprocess.run(
        [str(ENGINE_PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    """Start the engine, compare, write the result; 1 if the clients disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="h200-plain")
    parser.add_argument("--clock", type=float, default=0.125)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--lockstep", action="store_true", help="outputs of equal length")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        count = asked.requests
        tokens = asked.output_tokens
        spread = 0 if asked.lockstep else tokens // 2
        output = Uniform(tokens - spread, tokens + spread)
        write_prompts(folder / "prompts.jsonl", count, asked.prompt_tokens, output)
        write_tokenizer(folder / "tokenizer")
        (folder / "stubs").mkdir()
        (folder / "stubs/datasets.py").write_text("load_dataset = None\n")
        url = f"http://127.0.0.1:{port}"
        command = ["-m", "loadtest", "engine", f"base={asked.engine}:{port}"]
        engine = subprocess.Popen(
            [sys.executable, *command, "--clock", str(asked.clock)], cwd=ROOT, stdout=sys.stderr
        )
        try:
            for _ in range(100):
                try:
                    httpx.get(url + "/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            plan = Plan(folder, url, asked.concurrency, count)
            found = compare(plan, asked.rounds)
            simulation = httpx.get(url + "/server_info").json()["simulation"]
        finally:
            engine.terminate()
            engine.wait()
    made = provenance(["python", "-m", "tests.bench.loadtest_peer", *sys.argv[1:]], 1)
    document = {
        "schema": 1,
        "what": f"{OURS} and SGLang's {PEER} on the simulated engine {asked.engine}",
        "load": vars(asked),
        "peer": f"sglang {_version()}",
        **found,
        "engine_slipped_s": simulation["slipped_s"],
        "load_average": os.getloadavg(),
        "provenance": made,
    }
    name = "loadtest_peer_lockstep.json" if asked.lockstep else "loadtest_peer.json"
    (RESULTS / name).write_text(json.dumps(document, indent=1) + "\n")
    for key in ("medians", "ours_over_peer", "client_cpu_ms_per_request", "agree"):
        print(key, json.dumps(found[key]))
    return 0 if found["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
