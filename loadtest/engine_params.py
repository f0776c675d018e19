"""What an engine model is made of: its step times, its acceptance, its limits. Pure values."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

# The context at which the step times of a DecodeMode hold: the mean over a request of 256 tokens
# in, 256 out.
REFERENCE_CONTEXT_TOKENS = 384


class Rng(Protocol):
    """What the model asks of a random generator."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens that one speculative step yields for one request, bonus included: 1 to `longest`.

    Each draft token of the accepted path is accepted with a probability of the request's own, such
    that requests' mean lengths spread evenly over `mean * (1 - spread)` to `mean * (1 + spread)`,
    as far as 1 and `longest` allow.
    """

    mean: float
    longest: int
    spread: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.longest:
            raise ValueError(
                f"mean accept length {self.mean} must lie between 1 and {self.longest}"
            )

    def draw(self, rng: Rng) -> tuple[float, ...]:
        """Return one request's chances of a step longer than 1, 2, ... tokens."""
        room = min(self.spread * self.mean, self.mean - 1, self.longest - self.mean)
        # To a thousandth, so that most requests find their chances worked out.
        return self.chances(round(self.mean + room * (2 * rng.random() - 1), 3))

    @lru_cache(maxsize=8192)  # noqa: B019 - acceptances are few and live as long as the process
    def chances(self, mean: float) -> tuple[float, ...]:
        """Return the chances of a step longer than 1, 2, ... tokens whose sum is `mean - 1`."""
        low, high = 0.0, 1.0
        for _ in range(30):
            p = (low + high) / 2
            if sum(p**i for i in range(1, self.longest)) < mean - 1:
                low = p
            else:
                high = p
        return tuple(high**i for i in range(1, self.longest))


@dataclass(frozen=True, slots=True)
class DecodeMode:
    """One way to decode: its step time by batch size, what a step yields, its KV slots.

    `points` are (batch, seconds), batch ascending; between them time is linear, beyond the last the
    last slope goes on. `acceptance` None: one token a step.
    """

    points: tuple[tuple[int, float], ...]
    acceptance: Acceptance | None = None
    step_slots: int = 1

    def step_s(self, batch: int) -> float:
        """Return the time of one step of `batch` requests at the reference context, in seconds."""
        points = self.points
        at = min(max(bisect_right(points, batch, key=lambda point: point[0]), 1), len(points) - 1)
        (b0, t0), (b1, t1) = points[at - 1], points[at]
        return t0 + (t1 - t0) * (max(batch, points[0][0]) - b0) / (b1 - b0)


@dataclass(frozen=True, slots=True)
class EngineParams:
    """One engine model. `source` says where its numbers come from, `interpolated` that it is drawn
    through points. `off` is how it decodes while the engine plugin holds speculation off; None:
    nobody measured that.
    """

    name: str
    source: str
    decode: DecodeMode
    prefill_pass_s: float
    prefill_token_s: float
    kv_tokens: int
    kv_token_s: float = 0.0
    context_tokens: int = 8192
    prefill_pass_tokens: int = 8192
    max_running_requests: int = 4096
    interpolated: bool = False
    off: DecodeMode | None = None

    def __post_init__(self) -> None:
        if self.context_tokens > self.kv_tokens:
            raise ValueError(
                f"{self.name}: a request of {self.context_tokens} tokens does not fit the KV cache"
            )

    @property
    def speculative(self) -> bool:
        """Whether it drafts."""
        return self.decode.acceptance is not None
