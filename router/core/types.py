"""The nouns of steering. Everything here is a value: frozen, comparable, free of behaviour."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """What a server is: with speculative decoding, or without."""

    SPEC = "spec"
    BASE = "base"


class Layout(StrEnum):
    """Whether the servers' GPUs are the same ones or not."""

    SHARED = "shared"
    DISJOINT = "disjoint"


class Objective(StrEnum):
    """What the learnt policy makes small: summed time per token, lost token rate, or own time."""

    SUMMED = "summed"
    RATE = "rate"
    LATENCY = "latency"


class Phase(StrEnum):
    """Where a request stands: before its first token, or after it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """How an attempt ended. A closed set: metrics, logs and tests use these words."""

    OK = "ok"
    CLIENT_DISCONNECT = "client_disconnect"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_OVERLOAD = "upstream_overload"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    TRUNCATED = "truncated"


class Reason(StrEnum):
    """Why a server was chosen. A closed set: it appears in a header, in logs and in metrics."""

    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    DWELL = "dwell"
    FIXED = "fixed"
    LEAST_INFLIGHT = "least_inflight"
    SPLIT = "split"
    ONLY_SERVER = "only_server"
    CONTEXT_LENGTH = "context_length"
    MARGINAL = "marginal"
    UNMEASURED = "unmeasured"
    EXPLORE = "explore"
    AFFINITY = "affinity"
    STAY = "stay"
    SWITCH = "switch"
    OVERRIDE = "override"
    TARGET = "target"
    STORED = "stored"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One engine server as configured. `name` is unique; `gpus` are device indices, if known.

    `sequences_max` and `prefill_tokens_max` bound what it is given, None: as the others.
    """

    name: str
    role: Role
    url: str
    gpus: tuple[int, ...] = ()
    sequences_max: int | None = None
    prefill_tokens_max: int | None = None


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request asks for, as far as its body tells.

    `sequences` is n times the number of prompts; `prompt_tokens` is summed over the prompts and is
    an estimate where only text was given; `max_tokens` is per sequence, None if the client set no
    limit; `longest_prompt_tokens` is None where there is one prompt; `session` is a hash that the
    requests of one conversation share.
    """

    sequences: int = 1
    prompt_tokens: int = 0
    max_tokens: int | None = None
    longest_prompt_tokens: int | None = None
    session: int | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One server's load by the router's own count, at the moment of a decision.

    `context_tokens` are the prompt tokens of all sequences in flight, `prefill_tokens` those of
    them that wait for their first token.
    """

    name: str
    role: Role
    prefill_sequences: int = 0
    decode_sequences: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0

    @property
    def sequences(self) -> int:
        """Sequences in flight, both phases."""
        return self.prefill_sequences + self.decode_sequences


@dataclass(frozen=True, slots=True)
class Decision:
    """The server chosen and why."""

    server: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """What a patched engine says of its own switch. `threshold` is the highest batch that it still
    speculates at, `enable_threshold` the batch at which it starts again; None: not told.
    """

    state: str
    mode: str
    threshold: int | None = None
    enable_threshold: int | None = None
    off_share: float | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's own counts of sequences at one moment. None: not told.

    Sequences of other clients are in them, which the router's own count cannot know.
    """

    running: int | None = None
    queued: int | None = None
    switch: SwitchReport | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and the bounds that it lies between with about 95% confidence."""

    value: float
    low: float
    high: float


class Policy(Protocol):
    """Chooses one of the servers that can take the request.

    Called once per attempt, synchronously, with at least one candidate; candidates keep the order
    of the configuration. `loads` are all servers, candidates or not: a server that is excluded for
    one attempt still carries its load. `now` is monotonic, in seconds. A policy may hold state, but
    reads no clock.
    """

    @property
    def name(self) -> str:
        """The word that selects it in the configuration."""
        ...

    @property
    def mode(self) -> Role | None:
        """The role that all requests go to now, None if the policy has no such mode."""
        ...

    @property
    def switches(self) -> int:
        """How often the mode has changed."""
        ...

    def choose(
        self,
        shape: RequestShape,
        candidates: Sequence[ServerLoad],
        loads: Sequence[ServerLoad],
        now: float,
    ) -> Decision:
        """Return a decision whose server is one of `candidates`."""
        ...
