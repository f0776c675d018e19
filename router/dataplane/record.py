"""What is known of one request when it ends: the single source of its log line and its metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from router.core.admission import Priority, Waited
from router.core.types import Outcome, Reason, Role


class Refusal(StrEnum):
    """Why a request may go to another server: nothing was generated for it. A closed set."""

    CONNECT = "connect"
    OVERLOAD = "overload"


@dataclass(slots=True)
class RequestRecord:
    """One request from arrival to end. Times are seconds; unknown is None.

    `endpoint` is a route of the allow-list, never a client's string. `status` is what the client
    was sent, 499 if it left before a status could be sent. `retry` is why it was sent a second
    time, `waited` and `queue_s` how and when its wait for room ended.
    """

    request_id: str
    endpoint: str
    streaming: bool = False
    server: str | None = None
    role: Role | None = None
    reason: Reason | None = None
    outcome: Outcome = Outcome.OK
    status: int = 0
    attempts: int = 0
    retry: Refusal | None = None
    priority: Priority = Priority.INTERACTIVE
    waited: Waited | None = None
    queue_s: float | None = None
    sequences: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_exact: bool = False
    decision_s: float = 0.0
    ttft_s: float | None = None
    duration_s: float = 0.0
    error: str | None = None


class Observer(Protocol):
    """Where the relay reports to: metrics and the request log."""

    def gap_observer(self, server: str) -> Callable[[float], None]:
        """Return what takes gaps between chunks of `server`, in seconds. Called per chunk."""
        ...

    def finished(self, record: RequestRecord) -> None:
        """Take the record of an ended request. Called exactly once per request."""
        ...
