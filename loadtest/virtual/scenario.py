"""Scenarios: YAML files that say which servers, which load, and what happens meanwhile.

    title: Chain beside plain, each level held
    layout: disjoint           # or shared
    spec: h200-chain-v2        # engine models
    base: h200-plain
    threshold: 160             # spec has the plugin and speculates up to so many running requests
    noise: 0.05                # standard deviation of each server's speed, drawn every 0.25 s
    lengths: chat              # or trace, or {prompt_tokens: 256, output_tokens: 256}
    starts: [cold]             # what is known at first: cold, calibrated, misjudged
    duration_s: 120
    levels: [1, 2, 4]          # closed loops, one run each; or
    course: [[0, 8], [60, 8], [60, 128]]    # a closed loop along (seconds, level) points; or
    demands: [0.2, 0.5]        # a trace at these shares of the better server's capacity, each of
    requests: 3000             # so many requests
    marks_s: [60]              # a course is judged from each mark to the next
    events: [{at_s: 60, server: spec, slowness: 1.8}]   # or accept_length: 1.5, or alive: false

A course holds either `levels` or `course` or `demands`. A demand may exceed 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadtest.engine_params import EngineParams
from loadtest.engines import ENGINES
from loadtest.virtual.station import Event, Server
from loadtest.virtual.synthetic import synthetic_trace
from loadtest.workload import CHAT_MIX, Fixed, Lengths, Recorded
from router.bounded_file import FileError
from router.core.types import Layout, Role
from router.yaml_file import YamlFile, read_file

FOLDER = Path(__file__).parent / "scenarios"
_LEVEL_MAX = 1024
_DURATION_S_MAX = 7200.0
_REQUESTS_MAX = 100_000
_LENGTHS_SEED = 9
_KEYS = frozenset(
    (
        *("title", "layout", "spec", "base", "threshold", "noise", "lengths", "starts"),
        *("duration_s", "levels", "course", "demands", "requests", "marks_s", "events"),
    )
)
_EVENT_KEYS = frozenset(("at_s", "server", "slowness", "accept_length", "alive"))


class ScenarioError(ValueError):
    """A scenario cannot be used. The message says where, what, and what is allowed."""


class Start(StrEnum):
    """What the router knows when a run begins."""

    COLD = "cold"
    CALIBRATED = "calibrated"
    MISJUDGED = "misjudged"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario; exactly one of `levels`, `course` and `demands` is not empty."""

    name: str
    title: str
    layout: Layout
    spec: Server
    base: Server
    lengths: Lengths
    noise: float
    starts: tuple[Start, ...]
    duration_s: float
    levels: tuple[int, ...] = ()
    course: tuple[tuple[float, float], ...] = ()
    demands: tuple[float, ...] = ()
    requests: int = 0
    marks_s: tuple[float, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both servers."""
        return self.spec, self.base


def names() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load(name: str) -> Scenario:
    """Return a scenario by its name or the path of its file; ScenarioError if it is not right."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and not path.exists():
        raise ScenarioError(f"no scenario {name!r}; there are: {', '.join(names())}")
    try:
        return _Reader(read_file(str(path))).scenario(path.stem)
    except FileError as error:
        raise ScenarioError(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes the values of one file, each with its check."""

    file: YamlFile

    def scenario(self, name: str) -> Scenario:
        values = self.file.values
        for key in values:
            if key not in _KEYS:
                raise self._problem(key, f"is unknown; known: {', '.join(sorted(_KEYS))}")
        loads = [key for key in ("levels", "course", "demands") if key in values]
        if len(loads) != 1:
            raise ScenarioError(
                f"{self.file.path}: needs exactly one of levels, course and demands, "
                f"has {' and '.join(loads) or 'none'}"
            )
        threshold = self._whole("threshold", 1, _LEVEL_MAX) if "threshold" in values else None
        spec = Server("spec", Role.SPEC, self._engine("spec", threshold), threshold)
        made = Scenario(
            name=name,
            title=self._text("title"),
            layout=Layout(self._word("layout", tuple(Layout))),
            spec=spec,
            base=Server("base", Role.BASE, self._engine("base", None)),
            lengths=self._lengths(),
            noise=self._number("noise", 0.0, 0.5, 0.05),
            starts=self._starts(),
            duration_s=self._number("duration_s", 1.0, _DURATION_S_MAX, 120.0),
        )
        if "levels" in values:
            return replace(made, levels=self._levels())
        if "demands" in values:
            requests = self._whole("requests", 100, _REQUESTS_MAX)
            return replace(made, demands=self._numbers("demands", 0.01, 5.0), requests=requests)
        return replace(
            made,
            course=self._course(),
            marks_s=self._numbers("marks_s", 0.0, made.duration_s),
            events=self._events(spec.params),
        )

    def _problem(self, key: str, what: str) -> ScenarioError:
        where = self.file.where(key) if key in self.file.lines else f"{self.file.path} {key}"
        return ScenarioError(f"{where}: {what}")

    def _value(self, key: str) -> Any:
        if key not in self.file.values:
            raise self._problem(key, "is missing")
        return self.file.values[key]

    def _text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str) or not 0 < len(value) <= 120:
            raise self._problem(key, "must be text of 1 to 120 characters")
        return value

    def _word(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._value(key)
        if value not in allowed:
            raise self._problem(key, f"is {value!r}, allowed: {', '.join(allowed)}")
        return str(value)

    def _checked(self, key: str, value: object, low: float, high: float) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= float(value) <= high:  # type: ignore[arg-type]
            raise self._problem(key, f"is {value!r}, expected a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    def _number(self, key: str, low: float, high: float, default: float) -> float:
        return self._checked(key, self.file.values.get(key, default), low, high)

    def _whole(self, key: str, low: int, high: int) -> int:
        value = self._value(key)
        if not isinstance(value, int):
            raise self._problem(key, f"is {value!r}, expected a whole number")
        return int(self._checked(key, value, low, high))

    def _numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        value = self._value(key)
        if not isinstance(value, list) or not value:
            raise self._problem(key, "must be a list of numbers")
        return tuple(
            self._checked(f"{key}[{at}]", item, low, high) for at, item in enumerate(value)
        )

    def _levels(self) -> tuple[int, ...]:
        levels = self._numbers("levels", 1, _LEVEL_MAX)
        if any(level != int(level) for level in levels):
            raise self._problem("levels", "must be whole numbers")
        return tuple(int(level) for level in levels)

    def _engine(self, key: str, threshold: int | None) -> EngineParams:
        params = ENGINES[self._word(key, tuple(ENGINES))]
        if threshold is not None and params.off is None:
            raise self._problem(
                key, f"is {params.name}, whose steps without speculation are unknown"
            )
        return params

    def _lengths(self) -> Lengths:
        value = self.file.values.get("lengths", "chat")
        if value == "chat":
            return CHAT_MIX
        if value == "trace":
            rows = synthetic_trace(4000, _LENGTHS_SEED)
            return Recorded(tuple((row.prompt_tokens, row.output_tokens) for row in rows))
        if not isinstance(value, Mapping) or set(value) != {"prompt_tokens", "output_tokens"}:
            allowed = "chat, trace or {prompt_tokens: N, output_tokens: N}"
            raise self._problem("lengths", f"is {value!r}, allowed: {allowed}")
        prompt, output = (
            int(self._checked(f"lengths.{key}", value[key], 1, 4000))
            for key in ("prompt_tokens", "output_tokens")
        )
        return Fixed(prompt, output)

    def _starts(self) -> tuple[Start, ...]:
        value = self.file.values.get("starts", ["cold"])
        if not isinstance(value, list) or not value or any(v not in tuple(Start) for v in value):
            raise self._problem("starts", f"is {value!r}, a list of: {', '.join(Start)}")
        return tuple(Start(item) for item in value)

    def _course(self) -> tuple[tuple[float, float], ...]:
        value = self._value("course")
        pairs = isinstance(value, list) and all(
            isinstance(item, list) and len(item) == 2 for item in value
        )
        if not pairs or not value:
            raise self._problem("course", "must be a list of [seconds, level] pairs")
        points = tuple(
            (
                self._checked(f"course[{at}][0]", seconds, 0, _DURATION_S_MAX),
                self._checked(f"course[{at}][1]", level, 0, _LEVEL_MAX),
            )
            for at, (seconds, level) in enumerate(value)
        )
        if list(points) != sorted(points, key=lambda point: point[0]):
            raise self._problem("course", "must be in the order of time")
        return points

    def _events(self, spec: EngineParams) -> tuple[Event, ...]:
        value = self.file.values.get("events", [])
        if not isinstance(value, list):
            raise self._problem("events", "must be a list")
        return tuple(self._event(f"events[{at}]", item, spec) for at, item in enumerate(value))

    def _event(self, key: str, value: object, spec: EngineParams) -> Event:
        if not isinstance(value, Mapping) or not {"at_s", "server"} <= set(value) <= _EVENT_KEYS:
            allowed = ", ".join(sorted(_EVENT_KEYS))
            raise self._problem(key, f"needs at_s and server, and may have of: {allowed}")
        if len(value) != 3:
            raise self._problem(key, "needs exactly one of slowness, accept_length and alive")
        server = value["server"]
        if server not in tuple(Role):
            raise self._problem(f"{key}.server", f"is {server!r}, allowed: {', '.join(Role)}")
        event = Event(self._checked(f"{key}.at_s", value["at_s"], 0, _DURATION_S_MAX), server)
        if "slowness" in value:
            slowness = self._checked(f"{key}.slowness", value["slowness"], 0.1, 10)
            return replace(event, slowness=slowness)
        if "alive" in value:
            if not isinstance(value["alive"], bool):
                raise self._problem(f"{key}.alive", "must be true or false")
            return replace(event, alive=value["alive"])
        drafts = spec.decode.acceptance
        if drafts is None or server != Role.SPEC:
            raise self._problem(key, "only a server that speculates has an accept length")
        mean = self._checked(f"{key}.accept_length", value["accept_length"], 1, drafts.longest)
        decode = replace(spec.decode, acceptance=replace(drafts, mean=mean))
        return replace(event, params=replace(spec, decode=decode))
