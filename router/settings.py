"""What the router runs with, as values, units in their names. `router.configuration` fills them."""

from dataclasses import dataclass, field
from pathlib import Path

from router.core.calibration import Calibration
from router.core.policy import DEFAULT_DWELL_S, DEFAULT_THRESHOLD
from router.core.types import Layout, Objective, ServerSpec

# What a metric's label says where there is no server to name; so no server may be called so.
NO_SERVER = "none"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The only three limits of time on a relayed request. There is no total: answers may be long.

    `connect_s` to open a connection; `first_byte_s` from the sent request to the first byte of the
    answer, which SGLang sends with the first token only; `idle_s` between two reads after that.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, with its default.

    `threshold_down` None: a share of `threshold`, see `router.core.policy`. `calibration` is what
    was measured of the servers, `calibration_source` the file's name in messages; `state_file` is
    where what is learnt outlives the process.
    """

    servers: tuple[ServerSpec, ...]
    layout: Layout = Layout.DISJOINT
    policy: str = "marginal"
    objective: Objective = Objective.SUMMED
    calibration: Calibration | None = None
    calibration_source: str = ""
    state_file: Path | None = None
    threshold: int = DEFAULT_THRESHOLD
    threshold_down: int | None = None
    dwell_s: float = DEFAULT_DWELL_S
    host: str = "127.0.0.1"
    port: int = 30000
    timeouts: Timeouts = field(default_factory=Timeouts)
    body_limit_bytes: int = 64 * 2**20
    keepalive_s: float = 2.0
    probe_interval_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"
    admin_key: str | None = field(default=None, repr=False)
