"""Interleaved measurement: in each round, at each level, every arm, in changing order."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.gpu.arms import Site
from tests.gpu.figures import Row, decode_throughputs
from tests.gpu.load import burst, prompts
from tests.gpu.plan import Stage
from tests.gpu.servers import Server
from tests.gpu.session import Rows

WARM_TOKENS = 24
REPEATS = {1: 3, 2: 3, 4: 3, 8: 2}  # requests a worker; one at higher levels

Say = Callable[[str], None]
T = TypeVar("T")


def measure(server: Server, site: Site, level: int, seed: str) -> Row:
    """One burst of `level` workers on an idle server with an empty prefix cache."""
    few = min(level, 8)
    burst(server.url, prompts(site, few, f"clock {seed}", 16), few, 8)  # raises the GPU's clock
    server.flush_cache()
    steps_before = len(server.step_times_ms(level))
    log_before = server.log_size()
    work = prompts(site, level * REPEATS.get(level, 1), seed)
    done = burst(server.url, work, level, site.output_tokens)
    steps = server.step_times_ms(level)[steps_before:]
    decode = decode_throughputs(server.log_since(log_before), level)
    return {
        "arm": server.arm.name,
        "level": level,
        "requests": done.requests,
        "tok_s": round(done.tokens / done.wall_s, 1),
        "wall_s": round(done.wall_s, 3),
        "decode_tok_s": round(statistics.median(decode), 1) if decode else None,
        "step_ms": round(statistics.median(steps), 3) if steps else None,
        "step_ms_low": round(min(steps), 3) if steps else None,
        "intervals": len(steps),
        "accept_length": round(statistics.mean(done.accept_lengths), 3)
        if done.accept_lengths
        else None,
        "switch": server.switch() if server.arm.patched else None,
    }


def warm(server: Server, site: Site, levels: Sequence[int]) -> None:
    """Each level once, shortly: what is compiled or allocated at first use is then done."""
    for level in levels:
        work = prompts(site, level, f"warm {level}")
        burst(server.url, work, level, min(WARM_TOKENS, site.output_tokens))
        server.flush_cache()


def run_rounds(
    stage: Stage, servers: Sequence[Server], site: Site, rows: Rows, until: float, say: Say
) -> int:
    """Measure whole rounds while one more fits before `until` (monotonic); rounds done.

    A late run loses rounds, the same for all arms, and never a level.
    """
    longest_s = 0.0
    for number in range(stage.rounds):
        start = time.monotonic()
        if number and start + longest_s > until:
            say(f"stage {stage.number}: out of time after {number} of {stage.rounds} rounds")
            return number
        for index, level in enumerate(stage.levels):
            for server in in_turn(servers, number + index):
                seed = f"{stage.number} {number} {level}"
                row = measure(server, site, level, seed)
                rows.add({"stage": stage.number, "round": number, **row})
                say(
                    f"  {number} {level:>3} {server.arm.name:<16} {row['tok_s']:>9} tok/s  "
                    f"step {row['step_ms']} ms  accept {row['accept_length']}"
                )
        longest_s = max(longest_s, time.monotonic() - start)
    return stage.rounds


def in_turn(targets: Sequence[T], turn: int) -> list[T]:
    """Rotated by the turn, backwards every second time: no arm always follows the same one."""
    shift = turn % len(targets)
    order = [*targets[shift:], *targets[:shift]]
    return order[::-1] if turn % 2 else order
