"""`crossover-loadtest`: measure an OpenAI-compatible server, or serve simulated ones."""

import sys
from collections.abc import Callable, Sequence

_HELP = """\
usage: crossover-loadtest COMMAND [options]

commands:
  run        put a load on one or several servers and report speed and latency
  sweep      measure servers and router side by side over concurrency, in interleaved rounds
  calibrate  write the file that the router starts from, and say where the servers cross
  compare    compare two results files point by point, with intervals
  engine     serve simulated SGLang engines
  sim        run the router's steering in virtual time, against fixed rules

examples:
  crossover-loadtest run --url http://127.0.0.1:30000 --model M --concurrency 16 --requests 96
  crossover-loadtest sweep --target spec=http://a:1 --target base=http://b:1 --model M --plots out
  crossover-loadtest engine spec=h200-tree-v1:30001 base=h200-plain:30002

`crossover-loadtest COMMAND --help` says more.
"""


def run(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest run`; return its exit code."""
    from loadtest.run_command import main as measure

    return measure(argv)


def sweep(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest sweep`; return its exit code."""
    from loadtest.sweep import main as measure

    return measure(argv)


def calibrate(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest calibrate`; return its exit code."""
    from loadtest.calibrate import main as measure

    return measure(argv)


def compare(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest compare`; return its exit code."""
    from loadtest.compare import main as judge

    return judge(argv)


def sim(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest sim`; return its exit code."""
    from loadtest.virtual.command import main as simulate

    return simulate(argv)


def engine(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest engine`; return its exit code."""
    from loadtest.sim_server import main as serve

    return serve(argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "sweep": sweep,
    "calibrate": calibrate,
    "compare": compare,
    "engine": engine,
    "sim": sim,
}


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
