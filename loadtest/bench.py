"""What sweeps and calibrations have in common: the requests, the clock, one load on one server.

Output lengths spread evenly over half to one and a half times their mean. With equal lengths, all
requests of a closed loop start, prefill and end together, which no real traffic does.
"""

import argparse
import asyncio
import math
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loadtest.load import Load
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.preflight import InputError
from loadtest.provenance import API_KEY_VARIABLE
from loadtest.record import RunResult
from loadtest.results import OutputError
from loadtest.run_flags import api_key_of
from loadtest.runner import PROCESSES_MAX, Show, run_load
from loadtest.server_facts import ServerFacts, ask
from loadtest.target import Target
from loadtest.workload import Api, Drawn, Uniform, Workload

LEVEL_MAX = 10_000
# What a user can mend: asked for wrongly, no such server, no room for the results.
MENDABLE = (InputError, ValueError, OutputError)
VISITS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class _OfRound:
    """Lengths that depend on the round alone, not on the workload's seed."""

    lengths: Drawn
    seed: str

    def draw(self, index: int, rng: random.Random) -> tuple[int, int]:  # noqa: ARG002
        """Draw both lengths of request number `index`."""
        return self.lengths.draw(index, random.Random(f"{self.seed}/{index}"))  # noqa: S311 - load


@dataclass(frozen=True, slots=True)
class Bench:
    """How every load of a command is sent. `clock` None: as the servers tell."""

    model: str
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool
    seed: int
    api_key: str | None = field(repr=False)
    idle_timeout_s: float
    processes: int
    clock: float | None

    def workload(self, round_: int, visit: int) -> Workload:
        """Return a visit's requests: lengths as in every visit of the round, words of its own.

        Words that a server has seen would be in its prefix cache, be it by way of the router.
        """
        low, high = max(self.output_tokens // 2, 1), self.output_tokens + self.output_tokens // 2
        drawn = Drawn(Uniform(self.prompt_tokens, self.prompt_tokens), Uniform(low, high))
        lengths = _OfRound(drawn, f"{self.seed}/{round_}")
        return Workload(self.model, lengths, self.seed * VISITS_MAX + visit, self.ignore_eos)

    def target(self, url: str) -> Target:
        """Return the target at a base URL; ValueError if it is none."""
        return Target.parse(url, Api.CHAT, self.api_key)

    def facts(self, url: str) -> ServerFacts:
        """Ask a server what it is."""
        return ask(url, self.model, self.api_key)

    def clock_of(self, facts: Iterator[ServerFacts]) -> float:
        """Return the clock asked for, else the servers' own; InputError if theirs differ."""
        if self.clock is not None:
            return self.clock
        told = {known.clock for known in facts if known.problem is None and not known.router}
        if len(told) > 1:
            listed = ", ".join(f"{clock:g}" for clock in sorted(told))
            raise InputError(f"the servers' clocks differ ({listed}): give them one, or --clock")
        return told.pop() if told else 1.0

    async def measure(
        self,
        url: str,
        ramp: Ramp,
        workload: Workload,
        stop: asyncio.Event,
        show: Show,
    ) -> RunResult:
        """Run a closed loop along the ramp, in wall seconds, and cut it where the ramp ends."""
        total_s = ramp.points[-1][0]
        load = Load(
            (self.target(url),),
            workload,
            ClosedLoop(ramp, duration_s=total_s),
            cut_s=total_s,
            idle_timeout_s=self.idle_timeout_s,
        )
        return await run_load(load, processes=self.processes, show=show, stop=stop)


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second Ctrl-C is a KeyboardInterrupt."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, end, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def at_least_one(text: str) -> int:
    """Read a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def levels(text: str) -> tuple[int, ...]:
    """Read rising numbers of requests in flight."""
    found = tuple(at_least_one(part) for part in text.split(","))
    if list(found) != sorted(set(found)) or found[-1] > LEVEL_MAX:
        raise argparse.ArgumentTypeError(
            f"levels must rise to at most {LEVEL_MAX}, as in 1,2,4,8, not {text}"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a Bench."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=256, metavar="N")
    parser.add_argument(
        "--output-tokens",
        type=at_least_one,
        default=256,
        metavar="N",
        help="mean; lengths spread evenly over N/2 to 3N/2",
    )
    parser.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let the model end by itself; needed where ignore_eos is not known",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help=f"or set {API_KEY_VARIABLE}")
    parser.add_argument("--api-key", metavar="KEY", help="other users can see it")
    parser.add_argument("--idle-timeout", type=positive, default=120.0, metavar="S")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        choices=range(1, PROCESSES_MAX + 1),
        metavar="N",
        help="client processes (default 1)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--clock",
        type=positive,
        metavar="X",
        help="engine seconds per second; all times are engine time (default: as servers tell)",
    )


def make_bench(asked: argparse.Namespace) -> Bench:
    """Return the bench that the options of `add_arguments` ask for."""
    return Bench(
        model=asked.model,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        ignore_eos=not asked.no_ignore_eos,
        seed=asked.seed,
        api_key=api_key_of(asked),
        idle_timeout_s=asked.idle_timeout,
        processes=asked.processes,
        clock=asked.clock,
    )
