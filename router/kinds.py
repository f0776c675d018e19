"""The types of values that options have, and how one value is read from text and from YAML."""

from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit


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
        if type(value) is int and self.low <= value <= self.high:
            return value
        raise ValueError(self.allowed)


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high`, whole or not."""

    low: float
    high: float
    metavar: str = "X"
    what: str = "a number"

    @property
    def allowed(self) -> str:
        """Its range."""
        return f"{self.what} from {self.low:g} to {self.high:g}"

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
class Seconds(Number):
    """A duration."""

    metavar: str = "S"
    what: str = "seconds, a number"


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


@dataclass(frozen=True, slots=True)
class YesNo:
    """True or false."""

    allowed: str = "true or false"
    metavar: str = "BOOL"

    def from_text(self, text: str) -> bool:
        """Take the two words."""
        if text.lower() not in ("true", "false"):
            raise ValueError(self.allowed)
        return text.lower() == "true"

    def from_yaml(self, value: object) -> bool:
        """Take YAML's own."""
        if not isinstance(value, bool):
            raise ValueError(self.allowed)  # noqa: TRY004  (a kind raises one error)
        return value


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of web pages, or `*`: a variable with commas, a YAML string or list."""

    allowed: str = "* or origins such as https://chat.example.org, with commas between them"
    metavar: str = "ORIGIN"

    def from_text(self, text: str) -> tuple[str, ...]:
        """Take origins with commas between them."""
        return self._checked([part.strip().rstrip("/").lower() for part in text.split(",")])

    def from_yaml(self, value: object) -> tuple[str, ...]:
        """Take a string or a list of strings."""
        if isinstance(value, list) and value:
            return self._checked([_string(item).strip().rstrip("/").lower() for item in value])
        return self.from_text(_string(value))

    def _checked(self, origins: list[str]) -> tuple[str, ...]:
        if origins != ["*"]:
            for origin in origins:
                parts = urlsplit(Url().from_text(origin))
                if parts.path or origin != f"{parts.scheme}://{parts.netloc}":
                    raise ValueError(self.allowed)
        return tuple(origins)


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that is shown nowhere."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Secrets:
    """One or several keys, as they are: whoever uses them says what is wrong, and shows none."""

    allowed: str
    metavar: str = "KEY"

    def from_text(self, text: str) -> Secret:
        """Take anything."""
        return Secret(text)

    def from_yaml(self, value: object) -> Secret:  # noqa: ARG002
        """Take nothing: a settings file is no place for a key."""
        raise ValueError(self.allowed)


KEY_FILE = Text("the path of a file with the key", "FILE")
PEM_FILE = Text("the path of a PEM file", "FILE")
SEQUENCES = Whole(1, 100_000)
TOKENS = Whole(1, 100_000_000)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text")  # noqa: TRY004  (a kind raises one error)
    return value
