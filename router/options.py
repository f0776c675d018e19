"""The table of everything that can be set, and how one value of it is read.

The flag, the environment variable, the YAML key, the help text and the check of `docs/settings.md`
all come from `OPTIONS`: a name exists here and nowhere else.
"""

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from router.core.policy import DOWN_SHARE, POLICIES
from router.core.types import Layout, Objective
from router.settings import Settings

ENV_PREFIX = "CROSSOVER_"


class Kind(Protocol):
    """A type of value. Both ways of reading raise ValueError on what `allowed` does not name."""

    @property
    def allowed(self) -> str:
        """What a value may be, in words that follow 'expected'."""
        ...

    @property
    def metavar(self) -> str:
        """How the help shows a value."""
        ...

    def from_text(self, text: str) -> object:
        """Read a flag's or a variable's text."""
        ...

    def from_yaml(self, value: object) -> object:
        """Read a value that YAML has already given a type."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer from `low` to `high`."""

    low: int
    high: int
    metavar: str = "N"

    @property
    def allowed(self) -> str:
        """Its range."""
        return f"an integer from {self.low} to {self.high}"

    def from_text(self, text: str) -> int:
        """Read decimal digits."""
        return self.from_yaml(int(text))

    def from_yaml(self, value: object) -> int:
        """Take an int; true and false are none."""
        if isinstance(value, int) and not isinstance(value, bool) and self._holds(value):
            return value
        raise ValueError(self.allowed)

    def _holds(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration from `low` to `high` seconds."""

    low: float
    high: float
    metavar: str = "S"

    @property
    def allowed(self) -> str:
        """Its range."""
        return f"seconds, a number from {self.low:g} to {self.high:g}"

    def from_text(self, text: str) -> float:
        """Read a decimal number."""
        return self.from_yaml(float(text))

    def from_yaml(self, value: object) -> float:
        """Take an int or a float; not a number is none."""
        if isinstance(value, int | float) and not isinstance(value, bool) and self._holds(value):
            return float(value)
        raise ValueError(self.allowed)

    def _holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]
    metavar: str = "WORD"

    @property
    def allowed(self) -> str:
        """The words."""
        return f"one of {', '.join(self.words)}"

    def from_text(self, text: str) -> str:
        """Take a word of the list."""
        if text not in self.words:
            raise ValueError(self.allowed)
        return text

    def from_yaml(self, value: object) -> str:
        """Take a string that is a word of the list."""
        return self.from_text(_string(value))


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not empty."""

    allowed: str
    metavar: str

    def from_text(self, text: str) -> str:
        """Take anything but blanks."""
        if not text.strip() or not text.isprintable():
            raise ValueError(self.allowed)
        return text

    def from_yaml(self, value: object) -> str:
        """Take a string."""
        return self.from_text(_string(value))


@dataclass(frozen=True, slots=True)
class Url:
    """The root of a server: what comes before `/v1` in its URLs."""

    allowed: str = "http://HOST:PORT or https://HOST:PORT, without query, user or password"
    metavar: str = "URL"

    def from_text(self, text: str) -> str:
        """Take a URL; a trailing slash is dropped."""
        if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
            raise ValueError(self.allowed)
        parts = urlsplit(text)
        # Reading the port is what checks it.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(self.allowed)
        if any(char in text for char in "@?#%"):
            raise ValueError(self.allowed)
        return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"

    def from_yaml(self, value: object) -> str:
        """Take a string."""
        return self.from_text(_string(value))


@dataclass(frozen=True, slots=True)
class Urls:
    """One or several roots: a repeated flag, a variable with commas, a YAML string or list."""

    allowed: str = f"one or several of {Url().allowed}"
    metavar: str = "URL"

    def from_text(self, text: str) -> tuple[str, ...]:
        """Take URLs with commas between them."""
        return tuple(Url().from_text(part.strip()) for part in text.split(","))

    def from_yaml(self, value: object) -> tuple[str, ...]:
        """Take a string or a list of strings."""
        if isinstance(value, list) and value:
            return tuple(Url().from_yaml(item) for item in value)
        return (Url().from_yaml(value),)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text")  # noqa: TRY004  (a kind raises one error)
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be set. `name` is its YAML key; flag and variable follow from it."""

    name: str
    kind: Kind
    default: object
    help: str
    in_file: bool = True
    repeated: bool = False
    default_text: str | None = None

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
        return str(self.default) if self.has_default else "none"


_DAY_S = 86_400.0
_DEFAULT = Settings(servers=())
_WORDS_LOG_FORMAT = ("auto", "json", "text")
_WORDS_LOG_LEVEL = ("debug", "info", "warning", "error")

OPTIONS: tuple[Option, ...] = (
    Option(
        "config",
        Text("the path of a YAML file", "FILE"),
        None,
        "YAML file with the settings below, and servers",
        in_file=False,
    ),
    Option("spec_url", Urls(), (), "server with speculative decoding", repeated=True),
    Option("base_url", Urls(), (), "server without speculative decoding", repeated=True),
    Option(
        "layout",
        OneOf(tuple(Layout)),
        _DEFAULT.layout,
        "whether the servers run on the same GPUs or on different ones",
    ),
    Option("policy", OneOf(POLICIES), _DEFAULT.policy, "how a server is chosen"),
    Option(
        "objective",
        OneOf(tuple(Objective)),
        _DEFAULT.objective,
        "what policy marginal makes least: summed time per token, lost token rate, own latency",
    ),
    Option(
        "calibration",
        Text("the path of a calibration file", "FILE"),
        None,
        "file with the servers' measured speed, to start from",
    ),
    Option(
        "state_file",
        Text("a path in a directory that exists", "FILE"),
        None,
        "file that keeps what is learnt across restarts",
    ),
    Option(
        "threshold",
        Whole(0, 100_000),
        _DEFAULT.threshold,
        "most sequences in flight that still go to a spec server",
    ),
    Option(
        "threshold_down",
        Whole(0, 100_000),
        _DEFAULT.threshold_down,
        "back to spec at or below this",
        default_text=f"{DOWN_SHARE:g} x threshold",
    ),
    Option("dwell_s", Seconds(0, 3600), _DEFAULT.dwell_s, "least time between two switches"),
    Option(
        "host", Text("a host name or an address", "HOST"), _DEFAULT.host, "address to listen on"
    ),
    Option("port", Whole(0, 65535), _DEFAULT.port, "port to listen on, 0 for a free one"),
    Option(
        "connect_timeout_s",
        Seconds(0.1, 300),
        _DEFAULT.timeouts.connect_s,
        "to connect to a server",
    ),
    Option(
        "first_byte_timeout_s",
        Seconds(1, _DAY_S),
        _DEFAULT.timeouts.first_byte_s,
        "from a request to the first byte of its answer: queue and prefill",
    ),
    Option(
        "idle_timeout_s",
        Seconds(1, _DAY_S),
        _DEFAULT.timeouts.idle_s,
        "between two chunks of an answer, or of a request",
    ),
    Option(
        "body_limit_mb",
        Whole(1, 4096),
        _DEFAULT.body_limit_bytes // 2**20,
        "largest request body, in MiB",
    ),
    Option(
        "keepalive_s",
        Seconds(0, 3600),
        _DEFAULT.keepalive_s,
        "how long an idle connection to a server is kept; SGLang closes at 5",
    ),
    Option(
        "probe_interval_s",
        Seconds(1, 3600),
        _DEFAULT.probe_interval_s,
        "between probes of a server that is up",
    ),
    Option(
        "log_format",
        OneOf(_WORDS_LOG_FORMAT),
        _DEFAULT.log_format,
        "auto: text on a terminal, else JSON",
    ),
    Option(
        "log_level", OneOf(_WORDS_LOG_LEVEL), _DEFAULT.log_level, "least severe log lines to write"
    ),
    Option(
        "admin_key_file",
        Text("the path of a file with the key", "FILE"),
        None,
        "file with the key that opens engine control paths",
    ),
)
