"""The table of everything that can be set.

The flag, the environment variable, the YAML key, the help text and the check of `docs/settings.md`
all come from `OPTIONS`: a name exists here and nowhere else.
"""

from dataclasses import dataclass

from router.core.policy import DOWN_SHARE, POLICIES, THRESHOLD_MAX
from router.core.types import Layout, Objective
from router.kinds import (
    KEY_FILE,
    PEM_FILE,
    SEQUENCES,
    TOKENS,
    Kind,
    Number,
    OneOf,
    Origins,
    Seconds,
    Secrets,
    Text,
    Urls,
    Whole,
    YesNo,
)
from router.settings import Settings

ENV_PREFIX = "CROSSOVER_"


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be set. `name` is its YAML key; flag and variable follow from it.

    Some are no key of the file, and a secret is not even a flag: all could see it. What is `live`
    can change while requests run. `common` are those that the short help shows.
    """

    name: str
    kind: Kind
    default: object
    help: str
    in_file: bool = True
    in_flags: bool = True
    repeated: bool = False
    default_text: str | None = None
    live: bool = False
    common: bool = False

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def has_default(self) -> bool:
        """Whether it has a value without being given one."""
        return self.default_text is not None or self.default not in (None, ())

    @property
    def shown_default(self) -> str:
        """The default, for help and docs."""
        if self.default_text is not None:
            return self.default_text
        if isinstance(self.default, float):
            return f"{self.default:g}"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return str(self.default) if self.has_default else "none"


_DAY_S = 86_400.0
_DEFAULT = Settings(servers=())
_WORDS_LOG_FORMAT = ("auto", "json", "text")
_WORDS_LOG_LEVEL = ("debug", "info", "warning", "error")


def _secret(name: str, help_text: str) -> Option:
    """Return the option of a key that only the environment may hold."""
    return Option(name, Secrets("printable ASCII"), None, help_text, in_file=False, in_flags=False)


OPTIONS: tuple[Option, ...] = (
    Option(
        "config",
        Text("the path of a YAML file", "FILE"),
        None,
        "YAML file with the settings below, and servers",
        in_file=False,
        common=True,
    ),
    Option("spec_url", Urls(), (), "server with speculative decoding", repeated=True, common=True),
    Option(
        "base_url", Urls(), (), "server without speculative decoding", repeated=True, common=True
    ),
    Option(
        "layout",
        OneOf(tuple(Layout)),
        _DEFAULT.layout,
        "whether the servers run on the same GPUs or on different ones",
        common=True,
    ),
    Option(
        "policy", OneOf(POLICIES), _DEFAULT.policy, "how a server is chosen", live=True, common=True
    ),
    Option(
        "objective",
        OneOf(tuple(Objective)),
        _DEFAULT.objective,
        "what policy marginal makes least: summed time per token, lost token rate, own latency",
        live=True,
    ),
    Option(
        "calibration",
        Text("the path of a calibration file", "FILE"),
        None,
        "file with the servers' measured speed, to start from",
        common=True,
    ),
    Option(
        "state_file",
        Text("a path in a directory that exists", "FILE"),
        None,
        "file that keeps what is learnt across restarts",
        common=True,
    ),
    Option(
        "threshold",
        Whole(0, THRESHOLD_MAX),
        _DEFAULT.threshold,
        "most sequences in flight that still go to a spec server",
        live=True,
        common=True,
    ),
    Option(
        "threshold_down",
        Whole(0, THRESHOLD_MAX),
        _DEFAULT.threshold_down,
        "back to spec at or below this",
        default_text=f"{DOWN_SHARE:g} x threshold",
        live=True,
    ),
    Option(
        "dwell_s", Seconds(0, 3600), _DEFAULT.dwell_s, "least time between two switches", live=True
    ),
    Option(
        "host",
        Text("a host name or an address", "HOST"),
        _DEFAULT.host,
        "address to listen on",
        common=True,
    ),
    Option(
        "port", Whole(0, 65535), _DEFAULT.port, "port to listen on, 0 for a free one", common=True
    ),
    Option(
        "connect_timeout_s",
        Seconds(0.1, 300),
        _DEFAULT.timeouts.connect_s,
        "to connect to a server",
        live=True,
    ),
    Option(
        "first_byte_timeout_s",
        Seconds(1, _DAY_S),
        _DEFAULT.timeouts.first_byte_s,
        "from a request to the first byte of its answer: queue and prefill",
        live=True,
    ),
    Option(
        "idle_timeout_s",
        Seconds(1, _DAY_S),
        _DEFAULT.timeouts.idle_s,
        "between two chunks of an answer, or of a request",
        live=True,
    ),
    Option(
        "body_limit_mb",
        Whole(1, 4096),
        _DEFAULT.body_limit_bytes // 2**20,
        "largest request body, in MiB",
        live=True,
    ),
    Option(
        "server_sequences_max",
        SEQUENCES,
        None,
        "most sequences in flight on one server; more wait in the router",
        live=True,
        common=True,
    ),
    Option(
        "server_prefill_tokens_max",
        TOKENS,
        None,
        "most prompt tokens that wait for a first token on one server",
        live=True,
    ),
    Option(
        "sequences_max",
        SEQUENCES,
        None,
        "most sequences in flight on all servers together",
        live=True,
    ),
    Option(
        "prefill_tokens_max",
        TOKENS,
        None,
        "most prompt tokens that wait for a first token on all servers together",
        live=True,
    ),
    Option(
        "queue_max",
        Whole(0, 100_000),
        _DEFAULT.admission.queue_max,
        "most requests that wait in the router for room; more are refused",
        live=True,
        common=True,
    ),
    Option(
        "queue_timeout_s",
        Seconds(0.1, _DAY_S),
        _DEFAULT.admission.queue_timeout_s,
        "how long a request waits in the router for room",
        live=True,
    ),
    Option(
        "retry_share",
        Number(0, 1),
        _DEFAULT.admission.retry_share,
        "share of the requests that may go to a second server after a refusal",
        live=True,
    ),
    Option(
        "breaker_failures",
        Whole(0, 1000),
        _DEFAULT.admission.breaker_failures,
        "failures in a row after which a server is left alone for a while, 0 for never",
        live=True,
    ),
    Option(
        "slow_start_s",
        Seconds(0, 3600),
        _DEFAULT.admission.slow_start_s,
        "how long a server that returns gets less than its share",
        live=True,
    ),
    Option(
        "keepalive_s",
        Seconds(0, 3600),
        _DEFAULT.keepalive_s,
        "how long an idle connection to a server is kept; SGLang closes at 5",
        live=True,
    ),
    Option(
        "probe_interval_s",
        Seconds(1, 3600),
        _DEFAULT.probe_interval_s,
        "between probes of a server that is up",
        live=True,
    ),
    Option(
        "drain_timeout_s",
        Seconds(0, _DAY_S),
        _DEFAULT.drain_timeout_s,
        "how long what is under way at SIGTERM may take to end",
        live=True,
        common=True,
    ),
    Option(
        "allow_target",
        YesNo(),
        _DEFAULT.allow_target,
        "whether clients may name a server in x-crossover-target; the admin key always may",
        live=True,
    ),
    Option(
        "log_format",
        OneOf(_WORDS_LOG_FORMAT),
        _DEFAULT.log_format,
        "auto: text on a terminal, else JSON",
    ),
    Option(
        "log_level",
        OneOf(_WORDS_LOG_LEVEL),
        _DEFAULT.log_level,
        "least severe log lines to write",
        live=True,
        common=True,
    ),
    Option(
        "client_keys_file",
        Text("the path of a file with keys", "FILE"),
        None,
        "file with the keys that let clients in, one a line, NAME:KEY or KEY",
        common=True,
    ),
    _secret("client_keys", "the same, with commas between them"),
    Option(
        "admin_key_file",
        KEY_FILE,
        None,
        "file with the operator's key, for engine control paths, drains and overrides",
        common=True,
    ),
    _secret("admin_key", "the same"),
    Option("upstream_api_key_file", KEY_FILE, None, "file with the key that servers ask for"),
    _secret("upstream_api_key", "the same"),
    Option("upstream_admin_key_file", KEY_FILE, None, "file with the key to change servers' state"),
    _secret("upstream_admin_key", "the same"),
    Option(
        "upstream_ca_file",
        PEM_FILE,
        None,
        "certificate authorities of https servers, instead of the system's",
    ),
    Option("upstream_cert_file", PEM_FILE, None, "certificate to show to https servers"),
    Option("upstream_cert_key_file", PEM_FILE, None, "its key, if not in the same file"),
    Option("upstream_verify", YesNo(), True, "whether https servers must prove who they are"),
    Option("tls_cert_file", PEM_FILE, None, "certificate to listen with, by https", common=True),
    Option("tls_key_file", PEM_FILE, None, "its key, if not in the same file", common=True),
    Option("cors_origins", Origins(), (), "origins of web pages that may read answers"),
)
