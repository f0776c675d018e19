"""Start one SGLang server of the pair, from the environment that docker-compose.yml gives it.

Prints the exact command, then becomes it. `--print` only prints. What is wrong with the environment
is told in one line each; exit 2.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

PORTS = {"spec": 30001, "base": 30002}
# num_steps, eagle_topk, num_draft_tokens: the field's tree (worker v1), and a chain (worker v2).
DRAFTS = {"tree": (2, 4, 16), "chain": (3, 1, 4)}
_ALL = "0,1,2,3,4,5,6,7"
GPUS = {
    "shared": {"spec": _ALL, "base": _ALL},
    "disjoint": {"spec": "0,1,2,3", "base": "4,5,6,7"},
}
# Of a GPU's memory. Two servers on one GPU share it; the speculating one also holds a draft.
MEM_FRACTION = {
    "shared": {"spec": "0.44", "base": "0.42"},
    "disjoint": {"spec": "0.85", "base": "0.85"},
}

USAGE = """usage: launch_engine.py [--print] spec|base

Settings come from the environment: see .env.example.
"""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads settings; what is wrong gathers in `problems`. An empty value counts as not set."""

    environment: Mapping[str, str]
    problems: list[str] = field(default_factory=list)

    def text(self, name: str, default: str = "") -> str:
        """Return the value, or the default."""
        return self.environment.get(name, "").strip() or default

    def word(self, name: str, words: Mapping[str, object], default: str = "") -> str:
        """Return one of `words`."""
        value = self.text(name, default)
        if value in words:
            return value
        self._wrong(name, value, " or ".join(words))
        return next(iter(words))

    def number(self, name: str, default: str, low: float, high: float) -> str:
        """Return a number as it is written; empty stays empty."""
        value = self.text(name, default)
        try:
            good = not value or low <= float(value) <= high
        except ValueError:
            good = False
        if not good:
            self._wrong(name, value, f"a number from {low:.10g} to {high:.10g}")
        return value

    def model(self, name: str) -> str:
        """Return a model's path; it must be there."""
        value = self.text(name)
        if not value:
            self._wrong(name, value, "a path below /models, or a name to download")
        return value

    def gpus(self, name: str, default: str) -> str:
        """Return GPU indices with commas between them."""
        value = self.text(name, default).replace(" ", "")
        indices = value.split(",")
        if not all(index.isdecimal() for index in indices) or len({*indices}) < len(indices):
            self._wrong(name, value, "different GPU indices like 0,1,2,3")
        return value

    def words(self, name: str) -> list[str]:
        """Return words as a shell would split them."""
        try:
            return shlex.split(self.text(name))
        except ValueError as error:  # "No closing quotation"
            self._wrong(name, self.text(name), f"words as in a shell ({error})")
            return []

    def _wrong(self, name: str, value: str, allowed: str) -> None:
        self.problems.append(f"{name}: {value!r} is not allowed, expected {allowed}")


def command(role: str, reader: Reader) -> tuple[str, list[str]]:
    """Return the GPUs and the command of the server of `role`, if the reader has no problems."""
    layout = reader.word("LAYOUT", GPUS)
    gpus = reader.gpus(f"{role.upper()}_GPUS", GPUS[layout][role])
    fraction = reader.number(f"{role.upper()}_MEM_FRACTION", MEM_FRACTION[layout][role], 0.05, 0.98)
    options = [
        ("--model-path", reader.model("MODEL")),
        ("--served-model-name", reader.text("SERVED_MODEL_NAME")),
        # The containers' network, of which no port is published; a unit of systemd says otherwise.
        ("--host", reader.text("ENGINE_HOST", "0.0.0.0")),  # noqa: S104
        ("--port", str(PORTS[role])),
        ("--tp-size", str(len(gpus.split(",")))),
        ("--mem-fraction-static", fraction),
        # The same on both: left alone, SGLang takes 48 under speculation, and nothing compares.
        ("--max-running-requests", reader.number("MAX_RUNNING_REQUESTS", "256", 1, 65536)),
        ("--max-queued-requests", reader.number("MAX_QUEUED_REQUESTS", "512", 1, 65536)),
        ("--context-length", reader.number("CONTEXT_LENGTH", "", 1, 10**8)),
        ("--attention-backend", reader.text("ATTENTION_BACKEND")),
        *(speculation(reader) if role == "spec" else ()),
    ]
    flags = [part for flag, value in options if value for part in (flag, value)]
    server = [sys.executable, "-m", "sglang.launch_server", "--enable-metrics"]
    return gpus, [*server, *flags, *reader.words("ENGINE_ARGS")]


def speculation(reader: Reader) -> list[tuple[str, str]]:
    """Return the options of the speculating server."""
    steps, topk, tokens = DRAFTS[reader.word("SPECULATION", DRAFTS, "tree")]
    return [
        ("--speculative-algorithm", "EAGLE3"),
        ("--speculative-draft-model-path", reader.model("DRAFT_MODEL")),
        ("--speculative-num-steps", str(steps)),
        ("--speculative-eagle-topk", str(topk)),
        ("--speculative-num-draft-tokens", str(tokens)),
        ("--speculative-disable-batch-threshold", reader.number("OFF_ABOVE", "", 1, 65536)),
    ]


def start(gpus: str, words: list[str]) -> NoReturn:
    """Become the server."""
    os.execve(words[0], words, {**os.environ, "CUDA_VISIBLE_DEVICES": gpus})  # noqa: S606


def main(arguments: list[str]) -> int:
    """Run the command line; does not return where the server starts."""
    if "--help" in arguments:
        print(USAGE, end="")
        return 0
    roles = [argument for argument in arguments if argument != "--print"]
    if len(roles) != 1 or roles[0] not in PORTS:
        print(USAGE, end="", file=sys.stderr)
        return 2
    reader = Reader(os.environ)
    gpus, words = command(roles[0], reader)
    if reader.problems:
        for problem in reader.problems:
            print(f"launch_engine: {problem}", file=sys.stderr)
        return 2
    print(f"CUDA_VISIBLE_DEVICES={gpus} {shlex.join(words)}", flush=True)
    return 0 if "--print" in arguments else start(gpus, words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
