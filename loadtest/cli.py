"""`crossover-loadtest`: measure an OpenAI-compatible server, or serve simulated ones."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from loadtest import results
from loadtest.load import Load
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.provenance import provenance
from loadtest.record import RunResult
from loadtest.runner import run_blocking
from loadtest.stats import summarise
from loadtest.target import Target
from loadtest.workload import Fixed, Workload

API_KEY_VARIABLE = "CROSSOVER_API_KEY"
_HELP = """\
usage: crossover-loadtest COMMAND [options]

commands:
  run      send streamed chat requests to a server and report speed and latency
  engine   serve simulated SGLang engines

examples:
  crossover-loadtest run --url http://127.0.0.1:30000 --model M --concurrency 16 --requests 96
  crossover-loadtest engine spec=h200-tree-v1:30001 base=h200-plain:30002

`crossover-loadtest COMMAND --help` says more.
"""


class InputError(Exception):
    """What the user asked for cannot be; the message says why."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `run` was asked for."""

    url: str
    model: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool
    api_key: str | None
    idle_timeout_s: float
    seed: int
    json: str | None


def check_server(options: RunOptions) -> None:
    """Raise InputError unless the server answers, takes the key and has the model, if it lists."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        answer = httpx.get(
            options.url.rstrip("/") + "/v1/models", headers=headers, timeout=10.0, trust_env=False
        )
    except httpx.HTTPError as error:
        raise InputError(f"{options.url} does not answer: {error}") from None
    if answer.status_code in (401, 403):
        given = "the API key is refused" if options.api_key else "an API key is needed"
        raise InputError(
            f"{options.url}: {given} (HTTP {answer.status_code}): --api-key or {API_KEY_VARIABLE}"
        )
    if answer.status_code != 200:
        return  # it may well serve without listing
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return
    if options.model not in names:
        raise InputError(f"{options.url} has no model {options.model!r}, only: {', '.join(names)}")


def load_of(options: RunOptions) -> Load:
    """Return the closed loop that was asked for."""
    lengths = Fixed(options.prompt_tokens, options.output_tokens)
    return Load(
        (Target.parse(options.url, "/v1/chat/completions", options.api_key),),
        Workload(options.model, lengths, options.seed, options.ignore_eos),
        ClosedLoop(Ramp(((0.0, float(options.concurrency)),)), requests=options.requests),
        idle_timeout_s=options.idle_timeout_s,
    )


def run_figures(options: RunOptions, result: RunResult) -> dict[str, object]:
    """Return the run as it stands in the results."""
    return summarise(result.rows, result.duration_s) | {
        "concurrency": options.concurrency,
        "cpu_s": {"client": round(result.cpu_s, 3)},
        "client_lag_ms": {"max": round(max(result.lags_s) * 1e3, 3)},
    }


def _run(options: RunOptions, argv: Sequence[str]) -> int:
    from loadtest.bar import bar

    if options.json is not None:
        results.check_writable(options.json)
    check_server(options)
    with bar(options.requests) as show:
        result = run_blocking(load_of(options), show=lambda at: show(at.finished, at.errors))
    if result.gave_up is not None:
        raise InputError(f"gave up, nothing was ever answered: {result.gave_up}")
    figures = run_figures(options, result)
    found = results.document({"run": figures}, provenance(argv, options.seed))
    if options.json is not None:
        results.write(options.json, found)
    print(summary(figures), file=sys.stderr if options.json == "-" else sys.stdout)
    return 0 if figures["finished"] else 1


def summary(figures: dict[str, object]) -> str:
    """Return the figures as lines."""
    lines = [
        f"{figures['requests']} requests, {figures['errors']} failed",
        f"{figures['tokens']} tokens in {figures['duration_s']} s: {figures['tok_s']} tok/s",
    ]
    for key, label in (("ttft_ms", "TTFT"), ("itl_ms", "inter-token"), ("e2e_ms", "end to end")):
        spread = figures[key]
        assert isinstance(spread, dict)
        p50, p99 = ("-" if value is None else f"{value:.1f} ms" for value in spread.values())
        lines.append(f"{label}: p50 {p50}, p99 {p99}")
    kinds, examples = figures["error_kinds"], figures["error_examples"]
    assert isinstance(kinds, dict)
    assert isinstance(examples, list)
    lines += [f"failed, {kind}: {count}" for kind, count in kinds.items()]
    lines += [f"  {example}" for example in examples]
    return "\n".join(lines)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest run`."""
    made = argparse.ArgumentParser(
        prog="crossover-loadtest run",
        description="Keep so many streamed chat requests in flight until all are answered.",
        epilog="example: crossover-loadtest run --url http://127.0.0.1:30000 --model M "
        "--concurrency 16 --requests 96 --json run.json",
    )
    made.add_argument("--url", required=True, help="of the server, without /v1")
    made.add_argument("--model", required=True)
    made.add_argument("--concurrency", type=_at_least_one, default=16, metavar="N")
    made.add_argument("--requests", type=_at_least_one, default=96, metavar="N")
    made.add_argument("--prompt-tokens", type=_at_least_one, default=256, metavar="N")
    made.add_argument("--output-tokens", type=_at_least_one, default=256, metavar="N")
    made.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let the model end by itself; needed where ignore_eos is not known",
    )
    made.add_argument("--api-key", metavar="KEY", help=f"better set in {API_KEY_VARIABLE}")
    made.add_argument("--idle-timeout", type=float, default=120.0, metavar="S")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--json", metavar="FILE", help="write the results; - is stdout")
    return made


def run(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest run`; return its exit code."""
    asked = parser().parse_args(argv)
    options = RunOptions(
        url=asked.url,
        model=asked.model,
        concurrency=asked.concurrency,
        requests=asked.requests,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        ignore_eos=not asked.no_ignore_eos,
        api_key=asked.api_key or os.environ.get(API_KEY_VARIABLE),
        idle_timeout_s=asked.idle_timeout,
        seed=asked.seed,
        json=asked.json,
    )
    try:
        Target.parse(options.url, "")
        return _run(options, ["crossover-loadtest", "run", *argv])
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'crossover-router[loadtest]'"
    except (InputError, ValueError, results.OutputError) as error:
        message = str(error)
    print(f"crossover-loadtest run: {message}", file=sys.stderr)
    return 2


def engine(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest engine`; return its exit code."""
    from loadtest.sim_server import main as serve

    return serve(argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"run": run, "engine": engine}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crossover-loadtest`; return its exit code: 0 done, 1 nothing answered, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command = _COMMANDS.get(arguments[0])
    if command is None:
        known = ", ".join(_COMMANDS)
        print(
            f"crossover-loadtest: no command {arguments[0]!r}; there are: {known}", file=sys.stderr
        )
        return 2
    return command(arguments[1:])
