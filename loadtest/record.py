"""One request's row: everything that figures and plots are made from."""

from array import array
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

    Times are seconds of the run, unknown is None. `first_s` and `last_s` are the arrivals of
    the first and the last event that carried text; `gaps_s` are the times between such events.
    `tokens` is what the usage said, None where none arrived.
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
