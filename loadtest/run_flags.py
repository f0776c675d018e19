"""The command line of `crossover-loadtest run`, read into a load."""

import argparse
import os
import sys
from argparse import ArgumentTypeError, Namespace
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from loadtest.arrivals import ARRIVALS_MAX, Gaps, arrival_times
from loadtest.load import Load, WarmUp
from loadtest.pacing import ClosedLoop, OpenLoop, Pacer
from loadtest.preflight import InputError
from loadtest.provenance import API_KEY_VARIABLE
from loadtest.reading import TOKENS_MAX, Arrival, Reading, read_prompts, read_trace
from loadtest.runner import PROCESSES_MAX
from loadtest.shape import SECONDS_MAX, Shape, parse_shape
from loadtest.target import Target
from loadtest.workload import (
    Api,
    Drawn,
    Length,
    Lengths,
    Lognormal,
    Recorded,
    SharedPrefix,
    Uniform,
    Workload,
)

CONCURRENCY_MAX = 10_000
RATE_MAX = 10_000.0
DEFAULT_REQUESTS = 96
DEFAULT_CONCURRENCY = "16"
DEFAULT_TOKENS = Uniform(256, 256)
OPEN_LOOP_WARMUP_CONCURRENCY = 4
KEY_BYTES_MAX = 4096
APIS = {"chat": Api.CHAT, "completions": Api.COMPLETIONS, "generate": Api.GENERATE}

HELP = f"""\
usage: crossover-loadtest run --url URL --model M [options]

Sends streamed requests and reports throughput, time to first token and inter-token latency.

load, one of:
  --concurrency SHAPE     so many requests at once, closed loop (default {DEFAULT_CONCURRENCY})
  --rate SHAPE            so many a second, open loop; latency counts from the intended start
    --arrivals KIND         poisson (default), constant, or gamma with --cv CV (above 1: bursts)
  --trace FILE            TIMESTAMP,ContextTokens,GeneratedTokens: arrivals and lengths; lengths
    --time-scale X          only beside --concurrency or --rate. X of 0.5 plays it twice as fast
  SHAPE: 16, or with seconds 1..64/60 (ramp), or pieces of it 1/20,64/20,1/20 (steps)
end: --requests N (default {DEFAULT_REQUESTS}), --duration S, or that of the shape or the trace
what is sent:
  --api KIND              chat (default), completions, or generate (SGLang's own)
  --prompt-tokens LEN     256 (default), 64-512 (uniform), or lognormal:MEDIAN,SIGMA,MAX
  --output-tokens LEN     the same; forced by ignore_eos, unless --no-ignore-eos
  --prompts FILE          real prompts: JSON lines of OpenAI's or ShareGPT's kind
  --shared-prefix N[:K]   N tokens in front, one of K (default 1) such prefixes in turn
  --turns N               conversations of N turns, each with all that was said before
where: --url URL (several take turns)   --model M   --idle-timeout S (default 120: stalled)
       --api-key-file FILE, or {API_KEY_VARIABLE}, or --api-key KEY (other users can see it)
how:   --warmup N requests first, not counted (default 1)   --processes N   --seed N
out:   --json FILE (results)   --rows FILE (JSON lines, one a request)   - is stdout

exit: 0 done, 1 nothing was answered, 2 bad input or gave up, 130 Ctrl-C (results are kept)

examples:
  crossover-loadtest run --url http://127.0.0.1:30000 --model M --concurrency 16 --requests 96
  crossover-loadtest run --url http://a:1 --url http://b:1 --model M --rate 2/30,8/30 --json -
"""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What `run` was asked for. `requests` is how many will be started, None if time decides."""

    load: Load
    model: str
    urls: tuple[str, ...]
    api_key: str | None = field(repr=False)
    requests: int | None
    duration_s: float | None
    processes: int
    seed: int
    json: str | None
    rows: str | None
    readings: tuple[Reading, ...]
    described: dict[str, object]


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return HELP

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (--help says more)", file=sys.stderr)
        sys.exit(2)


def _whole(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ArgumentTypeError(f"must be a whole number from {low} to {high}, not {text}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= SECONDS_MAX:
        raise ArgumentTypeError(f"must be above 0 and at most {SECONDS_MAX:g}, not {text}")
    return value


def read_shape(text: str, high: float) -> Shape:
    """Read a shape for argparse."""
    try:
        return parse_shape(text, high=high)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def parse_length(text: str) -> Length:
    """Read a length or a distribution of it; ValueError says what is allowed."""
    kind, _, values = text.partition(":")
    try:
        if kind == "lognormal":
            median, sigma, high = values.split(",")
            if float(median) >= 1 and 0 <= float(sigma) <= 10 and 4 <= int(high) <= TOKENS_MAX:
                return Lognormal(float(median), float(sigma), int(high))
        else:
            low, dash, to = text.partition("-")
            found = Uniform(int(low), int(to if dash else low))
            if 1 <= found.low <= found.high <= TOKENS_MAX:
                return found
    except ValueError:
        pass
    raise ValueError(
        f"{text!r} is no length: N, LOW-HIGH or lognormal:MEDIAN,SIGMA,MAX, of at most {TOKENS_MAX}"
    )


def _length(text: str) -> Length:
    try:
        return parse_length(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _prefix(text: str) -> SharedPrefix:
    tokens, colon, count = text.partition(":")
    return SharedPrefix(_whole(tokens, 1, TOKENS_MAX), _whole(count, 1, 1000) if colon else 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `crossover-loadtest run`."""
    whole: Callable[[int, int], Callable[[str], int]] = lambda low, high: partial(  # noqa: E731
        _whole, low=low, high=high
    )
    made = _Parser(prog="crossover-loadtest run", allow_abbrev=False)
    made.add_argument("--url", action="append", required=True)
    made.add_argument("--model", required=True)
    load = made.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=partial(read_shape, high=CONCURRENCY_MAX))
    load.add_argument("--rate", type=partial(read_shape, high=RATE_MAX))
    made.add_argument("--arrivals", choices=[kind.value for kind in Gaps])
    made.add_argument("--cv", type=_seconds)
    made.add_argument("--trace")
    made.add_argument("--time-scale", type=_seconds)
    made.add_argument("--requests", type=whole(1, ARRIVALS_MAX))
    made.add_argument("--duration", type=_seconds)
    made.add_argument("--api", choices=list(APIS), default="chat")
    made.add_argument("--prompt-tokens", type=_length)
    made.add_argument("--output-tokens", type=_length)
    made.add_argument("--no-ignore-eos", action="store_true")
    made.add_argument("--prompts")
    made.add_argument("--shared-prefix", type=_prefix)
    made.add_argument("--turns", type=whole(1, 1000))
    made.add_argument("--idle-timeout", type=_seconds, default=120.0)
    made.add_argument("--api-key")
    made.add_argument("--api-key-file")
    made.add_argument("--warmup", type=whole(0, 100_000), default=1)
    made.add_argument("--processes", type=whole(1, PROCESSES_MAX), default=1)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--json")
    made.add_argument("--rows")
    return made


def api_key_of(asked: Namespace) -> str | None:
    """Return the key: of a file, a flag or the environment, in this order; None if there is none.

    InputError if the file has none.
    """
    if asked.api_key_file is None:
        key: str | None = asked.api_key or os.environ.get(API_KEY_VARIABLE) or None
        return key
    try:
        with Path(asked.api_key_file).open(encoding="ascii") as file:
            key = file.read(KEY_BYTES_MAX).strip()
    except UnicodeDecodeError:
        raise InputError(f"{asked.api_key_file}: a key has ASCII characters only") from None
    except OSError as error:
        raise InputError(f"cannot read {asked.api_key_file}: {error.strerror}") from None
    if not key:
        raise InputError(f"{asked.api_key_file} is empty")
    return key


def plan_run(argv: Sequence[str]) -> RunPlan:
    """Read the command line. InputError, InputFileError and ValueError are for the user."""
    asked = parser().parse_args(argv)
    _check_together(asked)
    trace, readings = read_trace(asked.trace) if asked.trace else ([], None)
    prompts, more = read_prompts(asked.prompts) if asked.prompts else ([], None)
    api_key, api = api_key_of(asked), APIS[asked.api]
    workload = Workload(
        model=asked.model,
        lengths=_lengths(asked, trace),
        seed=asked.seed,
        ignore_eos=not asked.no_ignore_eos,
        api=api,
        turns=asked.turns or 1,
        prefix=asked.shared_prefix,
        conversations=tuple(prompts),
    )
    pacer, requests, duration_s, at_once = _pacing(asked, trace)
    closed = isinstance(pacer, ClosedLoop)
    load = Load(
        targets=tuple(Target.parse(url, api, api_key) for url in asked.url),
        workload=workload,
        pacer=pacer,
        cut_s=duration_s if closed else None,
        idle_timeout_s=asked.idle_timeout,
        warmup=WarmUp(asked.warmup, min(at_once, max(asked.warmup, 1))),
    )
    return RunPlan(
        load=load,
        model=asked.model,
        urls=tuple(asked.url),
        api_key=api_key,
        requests=requests,
        duration_s=duration_s,
        processes=asked.processes,
        seed=asked.seed,
        json=asked.json,
        rows=asked.rows,
        readings=tuple(reading for reading in (readings, more) if reading is not None),
        described=_described(asked, closed=closed),
    )


def _check_together(asked: Namespace) -> None:
    wrong = {
        "--arrivals goes with --rate": asked.arrivals and not asked.rate,
        "--cv goes with --arrivals gamma": asked.cv and asked.arrivals != Gaps.GAMMA,
        "--arrivals gamma needs --cv": asked.arrivals == Gaps.GAMMA and not asked.cv,
        "--time-scale goes with --trace, without --concurrency and --rate": asked.time_scale
        and (not asked.trace or asked.concurrency or asked.rate),
        "--prompt-tokens: the prompts file has its own": asked.prompt_tokens and asked.prompts,
        "--prompt-tokens and --output-tokens: the trace has its own": asked.trace
        and (asked.prompt_tokens or asked.output_tokens),
        "--json and --rows cannot both be -": asked.json == asked.rows == "-",
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise InputError(message)


def _lengths(asked: Namespace, trace: Sequence[Arrival]) -> Lengths:
    if trace:
        return Recorded(tuple((line.prompt_tokens, line.output_tokens) for line in trace))
    return Drawn(asked.prompt_tokens or DEFAULT_TOKENS, asked.output_tokens or DEFAULT_TOKENS)


def _pacing(
    asked: Namespace, trace: Sequence[Arrival]
) -> tuple[Pacer, int | None, float | None, int]:
    """Return the pacer, its requests, its duration and how many the warm-up sends at once."""
    open_loop = asked.rate is not None or (asked.trace and asked.concurrency is None)
    if not open_loop:
        shape: Shape = asked.concurrency or parse_shape(DEFAULT_CONCURRENCY, high=CONCURRENCY_MAX)
        duration_s = asked.duration or shape.duration_s
        requests = asked.requests or (None if duration_s else DEFAULT_REQUESTS)
        pacer: Pacer = ClosedLoop(shape.ramp, requests=requests, duration_s=duration_s)
        return pacer, requests, duration_s, max(round(shape.highest), 1)
    duration_s = asked.duration
    if asked.rate is None:
        scale = asked.time_scale or 1.0
        every = (line.at_s * scale for line in trace)
        times = array("d", (at for at in every if duration_s is None or at < duration_s))
        pacer = OpenLoop(times[: asked.requests])
    else:
        duration_s = duration_s or asked.rate.duration_s
        times = arrival_times(
            asked.rate.ramp,
            Gaps(asked.arrivals or Gaps.POISSON),
            asked.seed,
            requests=asked.requests or (ARRIVALS_MAX if duration_s else DEFAULT_REQUESTS),
            duration_s=duration_s or SECONDS_MAX,
            cv=asked.cv or 1.0,
        )
        pacer = OpenLoop(times)
    if not pacer.times_s:
        raise InputError("this load has no request within its duration")
    return pacer, len(pacer.times_s), duration_s, OPEN_LOOP_WARMUP_CONCURRENCY


def _described(asked: Namespace, *, closed: bool) -> dict[str, object]:
    """Return the load as it stands in the results: what was asked for, without the key."""
    hidden = {"api_key", "api_key_file", "json", "rows", "concurrency", "rate"}
    given: dict[str, object] = {
        name: value if isinstance(value, str | int | float | list | bool) else repr(value)
        for name, value in sorted(vars(asked).items())
        if name not in hidden and value is not None
    }
    shape: Shape | None = asked.concurrency or asked.rate
    points = None if shape is None else [list(point) for point in shape.ramp.points]
    given["loop"] = "closed" if closed else "open"
    return given | {"points": points}
