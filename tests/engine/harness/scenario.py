"""What a run of the engine is asked and what it answers: values, without SGLang, that travel as
JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """Server arguments of one engine, beside those that all share (`DEFAULTS`)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    spec_v2: bool = False

    def __str__(self) -> str:
        """Name the engine in test ids."""
        return self.name

    def on_two_ranks(self) -> "Engine":
        """Return the same engine with its layers split over two processes."""
        return self.with_options("tp2", tp_size=2, dist_timeout=60)

    def with_options(self, label: str, **options: Any) -> "Engine":
        """Return the same engine with further server arguments, under its own name."""
        return Engine(f"{self.name}/{label}", {**self.options, **options}, self.spec_v2)


DEFAULTS: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "xgrammar",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "context_length": 512,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.9,  # of what is free just then; the pool is tiny
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "page_size": 1,
    "random_seed": 0,
    "log_level": "error",
}


def speculative(steps: int, topk: int, draft_tokens: int) -> dict[str, Any]:
    """Return the server arguments of an EAGLE-3 tree (topk > 1) or chain."""
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": draft_tokens,
    }


_V2_CHAIN = {**speculative(3, 1, 4), "disable_overlap_schedule": False}

GOODPUT: Mapping[str, str] = {
    "SGLANG_SPEC_SWITCH_POLICY": "goodput",
    "SGLANG_SPEC_SWITCH_TIMES": str(Path(__file__).with_name("step_times.json")),
    "SGLANG_SPEC_SWITCH_DWELL_STEPS": "1",
}
"""Reckon with a table that has speculation pay up to three requests."""

PLAIN = Engine("plain")
TREE = Engine("tree-2-4-16", speculative(2, 4, 16))
DEEP_TREE = Engine("tree-5-4-8", speculative(5, 4, 8))
CHAIN_V1 = Engine("chain-v1-3-1-4", speculative(3, 1, 4))
CHAIN_V1_PAGED = CHAIN_V1.with_options("page16", page_size=16)
CHAIN_V2 = Engine("chain-v2-3-1-4", _V2_CHAIN, spec_v2=True)
CHAIN_V2_PAGED = CHAIN_V2.with_options("page16", page_size=16)
SPECULATIVE = (TREE, DEEP_TREE, CHAIN_V1, CHAIN_V1_PAGED, CHAIN_V2, CHAIN_V2_PAGED)


@dataclass(frozen=True)
class Request:
    """One request; `at` and `abort_at` count iterations of the scheduler's loop within the case.

    A request that `follows` another is the next turn of its conversation: it arrives when that one
    has ended, and its prompt continues that one's prompt and output. `forbidden` tokens are
    taken out by a custom logit processor.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 24
    at: int = 0
    follows: int | None = None
    abort_at: int | None = None
    top_logprobs: int | None = None
    hidden_states: bool = False
    forbidden: Sequence[int] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Requests that one scheduler serves together, from an idle engine to an idle engine."""

    name: str
    requests: Sequence[Request]
    flush_first: bool = True


@dataclass(frozen=True)
class Output:
    """One request's answer.

    `steps` are its decode steps: (number of the step in the case, tokens output before it, tokens
    that it added); `hidden_states` are one vector for each, if asked for.
    """

    tokens: list[int]
    finish: str
    verify_steps: int
    cached_tokens: int
    retractions: int
    logprobs: list[float]
    top_logprobs: list[list[tuple[float, int]]]
    hidden_states: list[list[float]]
    steps: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Accounting:
    """What the idle engine holds that neither its free list nor its prefix cache owns; `CLEAN`
    is right.
    """

    pages_lost: int = 0
    pages_owned_twice: int = 0
    slots_protected: int = 0
    rows_lost: int = 0


CLEAN = Accounting()


@dataclass(frozen=True)
class CaseResult:
    """All requests of a case in order, batch size and mode of each decode step, and what was held.

    `modes` and `decided_for` (its batch size) are the plugin's own record of this rank's decode
    steps, empty without the plugin. `internal_state` and
    `load` are what the scheduler answers to `/server_info` and `/v1/loads` afterwards, in excerpts;
    they count since the scheduler was built.
    """

    outputs: list[Output]
    iterations: int
    batch_sizes: list[int]
    modes: list[str]
    decided_for: list[int]
    accounting: Accounting
    internal_state: dict[str, Any]
    load: dict[str, Any]

    @property
    def tokens(self) -> list[list[int]]:
        """Output tokens per request."""
        return [output.tokens for output in self.outputs]

    @property
    def accept_length(self) -> float:
        """Tokens per request and decode step."""
        steps = [added for output in self.outputs for _, _, added in output.steps]
        return sum(steps) / len(steps)

    def accepted(self, mode: str | None = None) -> dict[tuple[int, int], int]:
        """Tokens added per step, by (request, tokens before it); of steps in one mode, if given."""
        return {
            (request, before): added
            for request, output in enumerate(self.outputs)
            for step, before, added in output.steps
            if mode is None or self.modes[step] == mode
        }

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> "CaseResult":
        """Build from what `dump` returned, after a trip through JSON."""
        outputs = [
            Output(**{**output, "steps": [tuple(step) for step in output["steps"]]})
            for output in value["outputs"]
        ]
        return cls(**{**value, "outputs": outputs, "accounting": Accounting(**value["accounting"])})

    def dump(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """Cases for one engine in a process of its own, with environment variables of its own."""

    engine: Engine
    cases: Sequence[Case]
    environment: Mapping[str, str] = field(default_factory=dict)
    sabotage: str | None = None

    def __str__(self) -> str:
        """Name the job in test ids."""
        parts = [self.engine.name, *self.environment.values(), self.sabotage]
        return "-".join(part for part in parts if part)

    def dump(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> "Job":
        """Build from what `dump` returned, after a trip through JSON."""
        cases = [
            Case(
                case["name"],
                [Request(**request) for request in case["requests"]],
                case["flush_first"],
            )
            for case in value["cases"]
        ]
        return cls(Engine(**value["engine"]), cases, value["environment"], value["sabotage"])
