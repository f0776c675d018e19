"""Streamed chat by the project's own load client: steady levels and a step, at one address.

A steady level begins as if it had run for ever: each first request is cut to a random rest of its
length, so that requests end one by one. What arrives while the load settles is not counted.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import uvloop

from loadtest.load import Load
from loadtest.pacing import ClosedLoop, Pacer, Ramp
from loadtest.record import RequestRow, RunResult
from loadtest.stats import percentile, summarise, timeline
from loadtest.steady import figures
from loadtest.target import Target
from loadtest.workload import Api, Lengths, Lognormal, Workload
from tests.gpu.figures import Row
from tests.gpu.processes import Process

BIN_S = 0.1
STEP_BIN_S = 0.25
LOOK_S = 0.25
IDLE_TIMEOUT_S = 60.0
STRAGGLER = 1  # number of the request that asks for very many tokens: early in the low load

Look = Callable[[], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Aim:
    """What is loaded: one server, or the router. `watched` are processes whose CPU is counted."""

    name: str
    url: str
    model: str
    watched: Mapping[str, Process]


@dataclass(frozen=True, slots=True)
class Renewed:
    """Requests of one length; the first `level` of them are rests of it."""

    level: int
    prompt_tokens: int
    output_tokens: int

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:
        """Return both lengths of request `index`."""
        whole = index >= self.level
        return self.prompt_tokens, self.output_tokens if whole else rng.randint(
            1, self.output_tokens
        )


@dataclass(frozen=True, slots=True)
class Mixed:
    """Outputs of many lengths, and one straggler."""

    prompt_tokens: int
    output: Lognormal
    straggler_tokens: int

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:
        """Return both lengths of request `index`."""
        output_tokens = self.output.draw(rng)
        return self.prompt_tokens, self.straggler_tokens if index == STRAGGLER else output_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A low, a high and a low load: `(seconds, level)` each; then everything is answered."""

    phases: tuple[tuple[float, int], ...]
    lengths: Mixed

    @property
    def ends_s(self) -> list[float]:
        """When each phase ends."""
        return [sum(s for s, _ in self.phases[: at + 1]) for at in range(len(self.phases))]

    def pacer(self) -> ClosedLoop:
        """The closed loop of these phases."""
        begins = [0.0, *self.ends_s]
        points = []
        for (begin, end), (_, level) in zip(pairwise(begins), self.phases, strict=True):
            points += [(begin, float(level)), (end, float(level))]
        return ClosedLoop(Ramp(tuple(points)), duration_s=begins[-1])


@dataclass(frozen=True, slots=True)
class _Outcome:
    rows: list[RequestRow]
    duration_s: float
    client: dict[str, Any]


def steady(
    aim: Aim, lengths: Renewed, *, settle_s: float, window_s: float, seed: int
) -> dict[str, Any]:
    """What `lengths.level` streams do in `window_s` after `settle_s`."""
    duration_s = settle_s + window_s
    loop = ClosedLoop(Ramp(((0.0, float(lengths.level)),)), duration_s=duration_s)
    found = _run(aim, lengths, seed, loop, duration_s, None)
    line = timeline(found.rows, duration_s, BIN_S)
    counted = [at for at, middle in enumerate(line.at_s) if middle > settle_s]
    return {
        "level": lengths.level,
        **figures(found.rows, settle_s, duration_s),
        "in_flight": {
            name: round(sum(busy[at] for at in counted) / len(counted), 2)
            for name, busy in line.in_flight.items()
        },
        **found.client,
    }


def step(aim: Aim, plan: Step, *, limit_s: float, seed: int, look: Look) -> Row:
    """One run of the step: what arrived when, what was in flight where, and what `look` saw.

    What is not answered by `limit_s` is cut off.
    """
    samples: list[dict[str, object]] = []
    found = _run(aim, plan.lengths, seed, plan.pacer(), limit_s, (look, samples))
    bins = math.ceil(found.duration_s / STEP_BIN_S)
    line = timeline(found.rows, found.duration_s, found.duration_s / bins)
    long = found.rows[STRAGGLER] if len(found.rows) > STRAGGLER else None
    return {
        "phases": plan.phases,
        "wall_s": round(found.duration_s, 3),
        **summarise(found.rows, found.duration_s),
        "at_s": line.at_s,
        "timeline_tok_s": line.tok_s,
        "in_flight": line.in_flight,
        "straggler": long
        and {"tokens": long.tokens, "end_s": long.end_s, "server": long.server, "end": long.ending},
        "samples": samples,
        **found.client,
    }


def _run(
    aim: Aim,
    lengths: Lengths,
    seed: int,
    pacer: Pacer,
    cut_s: float | None,
    watch: tuple[Look, list[dict[str, object]]] | None,
) -> _Outcome:
    load = Load(
        (Target.parse(aim.url, Api.CHAT),),
        Workload(aim.model, lengths, seed),
        pacer,
        cut_s=cut_s,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    before = {name: process.cpu_s() for name, process in aim.watched.items()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_watched(load, watch))
    cpu: dict[str, float | None] = {"client": round(result.cpu_s / result.duration_s, 3)}
    for name, process in aim.watched.items():
        begin, end = before[name], process.cpu_s()
        known = begin is not None and end is not None
        cpu[name] = round((end - begin) / result.duration_s, 3) if known else None
    for row in result.rows:
        row.server = row.server or aim.name
    lag_s = percentile(result.lags_s, 0.99)
    lag_ms = None if lag_s is None else round(lag_s * 1e3, 2)
    client = {"client_lag_ms_p99": lag_ms, "cpu": cpu, "gave_up": result.gave_up}
    return _Outcome(result.rows, result.duration_s, client)


async def _watched(load: Load, watch: tuple[Look, list[dict[str, object]]] | None) -> RunResult:
    # Here, not above: it parses HTTP by a package that a machine with SGLang may get only later.
    from loadtest.runner import run_load

    if watch is None:
        return await run_load(load)
    look, samples = watch
    running = asyncio.create_task(run_load(load))
    began = time.monotonic()
    while not (await asyncio.wait({running}, timeout=LOOK_S))[0]:
        seen = await asyncio.to_thread(look)
        samples.append({"at_s": round(time.monotonic() - began, 2), **seen})
    return await running
