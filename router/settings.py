"""What the router runs with: one frozen value, resolved from flags, environment, file and defaults."""

from dataclasses import dataclass, field

from router.core.types import Layout, ServerSpec


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
    """Everything that can be set. Field names are the names of `router.options.OPTIONS`, units included."""

    servers: tuple[ServerSpec, ...]
    layout: Layout = Layout.DISJOINT
    policy: str = "threshold"
    threshold: int = 8
    threshold_down: int | None = None
    dwell_s: float = 1.0
    host: str = "127.0.0.1"
    port: int = 30000
    timeouts: Timeouts = field(default_factory=Timeouts)
    body_limit_bytes: int = 64 * 2**20
    keepalive_s: float = 2.0
    probe_interval_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"
    admin_key: str | None = field(default=None, repr=False)
