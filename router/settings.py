"""What the router runs with, as values, units in their names. `router.configuration` fills them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from router.core.admission import Limits
from router.core.calibration import Calibration
from router.core.policy import DEFAULT_DWELL_S, DEFAULT_THRESHOLD
from router.core.types import Layout, Objective, ServerSpec
from router.tls import ClientTls, ServerTls

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
class Admission:
    """How much may be in flight and who waits for it; who is sent again, or nothing for a while.

    `limits` are in sequences and prompt tokens; `queue_max` requests may wait, each for
    `queue_timeout_s`. `retry_share` of the requests may be sent a second time after a refusal. A
    server is left alone after `breaker_failures` in a row (0: never), and gets its full share again
    within `slow_start_s` of its return (0: at once).
    """

    limits: Limits = field(default_factory=Limits)
    queue_max: int = 1000
    queue_timeout_s: float = 60.0
    retry_share: float = 0.2
    breaker_failures: int = 5
    slow_start_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A key that lets a client in. `name` is how it is called where it must not be shown."""

    key: str = field(repr=False)
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """How the router is let in by one server: the keys that it sends, and TLS of an https URL.

    Without an `api_key`, clients' own keys go through. `admin_key` opens what changes the engine's
    state; without one, `api_key` is sent there as well, as SGLang expects it.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tls: ClientTls = field(default_factory=ClientTls)


NO_ACCESS: Mapping[str, Access] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Security:
    """Who is let in, and how the router is let in itself.

    No `client_keys`: everyone is. `admin_key` None: nobody changes anything. `access` is by server
    name; `tls` None: plain HTTP. `cors_origins` are those whose pages may read answers, `*` is any.
    """

    client_keys: tuple[ClientKey, ...] = ()
    admin_key: str | None = field(default=None, repr=False)
    access: Mapping[str, Access] = field(default_factory=lambda: NO_ACCESS)
    tls: ServerTls | None = None
    cors_origins: tuple[str, ...] = ()


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
    admission: Admission = field(default_factory=Admission)
    keepalive_s: float = 2.0
    drain_timeout_s: float = 30.0
    allow_target: bool = False
    probe_interval_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"
    security: Security = field(default_factory=Security)
