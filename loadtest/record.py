"""What a run leaves behind: a row for each request, and what the client itself cost."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    """How a request ended. All but OK and CUT count as errors, under this name."""

    OK = "ok"
    CUT = "cut"  # still streaming when the run's time was up
    CONNECT = "connect"
    RESET = "reset"
    HTTP = "http"
    STREAM_ERROR = "stream_error"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"

    @property
    def is_error(self) -> bool:
        """Whether it counts as an error."""
        return self not in (Ending.OK, Ending.CUT)


@dataclass(slots=True)
class RequestRow:
    """One request from its intended start to its end.

    Times are seconds of the run, unknown is None. `intended_s` is when the load wanted it to start
    and `sent_s` when it was written to its connection. `first_s` and `last_s` are the arrivals of
    the first and the last event that carried text; `gaps_s` are the times between such events.
    `tokens` is what the usage said, None where none arrived. `turn` counts from 0 within the
    conversation `index`. `url` is the target's base URL.
    """

    index: int
    intended_s: float
    sent_s: float
    max_tokens: int
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    events: int = 0
    body_bytes: int = 0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    status: int | None = None
    server: str | None = None
    reason: str | None = None
    ending: Ending | None = None
    error: str | None = None
    turn: int = 0
    url: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run's measured rows in the order of their start, and what the client itself cost.

    `duration_s` is the measured time, from its begin to the last end or the cut.
    `warmup` are the rows of the warm-up that came before it, with times before 0: no figure counts
    them. `lags_s` are samples of how late the client was, `cpu_s` is the CPU time of all its
    `processes` during the measured time. `gave_up` is why the run ended early, `interrupted` that
    the user ended it.
    """

    rows: list[RequestRow]
    duration_s: float
    cpu_s: float
    lags_s: "array[float]"
    warmup: list[RequestRow] = field(default_factory=list)
    processes: int = 1
    gave_up: str | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class ServerProgress:
    """What one server has done so far. Tokens of unfinished requests are estimated from events."""

    in_flight: int = 0
    requests: int = 0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A look at a run under way, or at its warm-up if `warming`."""

    elapsed_s: float
    started: int
    finished: int
    errors: int
    in_flight: int
    servers: Mapping[str, ServerProgress]
    warming: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of all servers."""
        return sum(server.tokens for server in self.servers.values())


def row_object(row: RequestRow, *, warmup: bool = False) -> dict[str, object]:
    """Return a row as it stands in a rows file: JSON types, seconds to the microsecond."""
    return {
        "index": row.index,
        "turn": row.turn,
        "warmup": warmup,
        "url": row.url,
        "intended_s": round(row.intended_s, 6),
        "sent_s": round(row.sent_s, 6),
        "first_s": _micro(row.first_s),
        "last_s": _micro(row.last_s),
        "end_s": _micro(row.end_s),
        "max_tokens": row.max_tokens,
        "tokens": row.tokens,
        "prompt_tokens": row.prompt_tokens,
        "events": row.events,
        "body_bytes": row.body_bytes,
        "status": row.status,
        "server": row.server,
        "reason": row.reason,
        "ending": row.ending,
        "error": row.error,
        "gaps_s": [round(gap, 6) for gap in row.gaps_s],
    }


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
