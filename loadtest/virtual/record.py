"""What a run in virtual time leaves behind."""

from dataclasses import dataclass, field

from loadtest.workload import Ask
from router.core.ledger import Lease


@dataclass(slots=True, eq=False)
class Request:
    """One request and what became of it. Times are seconds of the run."""

    ask: Ask
    intended_s: float
    server: str | None = None
    first_s: float | None = None
    end_s: float | None = None
    failed: bool = False
    lease: Lease | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tick:
    """The state at one look: cumulative output tokens and requests in flight, by server."""

    at_s: float
    tokens: tuple[int, ...]
    in_flight: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave. `in_flight_s` is time spent at each number of requests in flight."""

    servers: tuple[str, ...]
    duration_s: float
    tokens: int
    requests: tuple[Request, ...]
    ticks: tuple[Tick, ...]
    in_flight_s: dict[int, float]
    mode_switches: tuple[float, ...]
    leases_left: int
