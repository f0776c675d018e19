"""The calibration file, and the state file that has the same form: what is known of the servers.

    {"schema": 1, "model": "llama-8b", "layout": "disjoint",
     "servers": [{"role": "spec", "name": null, "engine_version": "0.5.12.post1", "gpus": "1x H200",
                  "tpot": [{"sequences": 1, "s": 0.0048, "low_s": 0.0047, "high_s": 0.0049,
                            "windows": 20, "mode": "on"}],
                  "ttft": [{"prefill_tokens": 256, "s": 0.011, "low_s": 0.010, "high_s": 0.012}]}],
     "interference": {"slowdown": 1.0, "low": 1.0, "high": 1.1}}

`s` are seconds: per output token of one sequence with so many in flight, and to the first token
with so many prompt tokens to be prefilled, its own included. `mode` is "on" or "off" where the
server changes its mode by itself, else absent. `slowdown` is how much longer a token takes while
another server works too, 1 for GPUs of its own. What is not known is null or absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.core.types import Layout, Role

SCHEMA = 1
_MODES = ("on", "off")
_POINTS_MAX = 1000
_SERVERS_MAX = 64
_TEXT_MAX = 300


class CalibrationError(ValueError):
    """The file cannot be used. The message names file, key, value and what is allowed."""


class StaleError(CalibrationError):
    """The file is sound, but of another model, GPU or engine."""


@dataclass(frozen=True, slots=True)
class TpotPoint:
    """Seconds per output token of one sequence while `sequences` are in flight."""

    sequences: float
    s: float
    low_s: float
    high_s: float
    windows: float = 1.0
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class TtftPoint:
    """Seconds to the first token while `prefill_tokens` are to be prefilled, own ones included."""

    prefill_tokens: float
    s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Interference:
    """How much longer a token takes while another server works too."""

    slowdown: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """What is known of one server, or with `name` None of every server of the role."""

    role: Role
    name: str | None = None
    engine_version: str | None = None
    gpus: str | None = None
    tpot: tuple[TpotPoint, ...] = ()
    ttft: tuple[TtftPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Calibration:
    """The content of a calibration or state file."""

    servers: tuple[ServerProfile, ...]
    model: str | None = None
    layout: Layout | None = None
    interference: Interference | None = None

    def profile(self, name: str, role: Role) -> ServerProfile | None:
        """Return the profile of the server by its name, else by its role."""
        for wanted in (name, None):
            for server in self.servers:
                if server.name == wanted and server.role is role:
                    return server
        return None

    def check_fresh(self, source: str, model: str | None, name: str, server: ServerProfile) -> None:
        """Raise StaleError if a known fact of the running server `name` contradicts the file.

        `server` holds the facts: role, engine version, GPUs. A fact unknown on either side passes.
        """
        known = self.profile(name, server.role)
        facts = [("model", self.model, model)]
        if known is not None:
            facts += [
                ("engine_version", known.engine_version, server.engine_version),
                ("gpus", known.gpus, server.gpus),
            ]
        for key, theirs, ours in facts:
            if theirs is not None and ours is not None and theirs != ours:
                raise StaleError(
                    f"{source}: {key} is {theirs!r}, but {name} runs {ours!r}: "
                    "calibrate again, or start without the file"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the file's content as JSON values. `from_json` of it is equal to this."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "layout": None if self.layout is None else str(self.layout),
            "servers": [_profile_json(server) for server in self.servers],
            "interference": None
            if self.interference is None
            else {
                "slowdown": self.interference.slowdown,
                "low": self.interference.low,
                "high": self.interference.high,
            },
        }

    @classmethod
    def from_json(cls, obj: object, source: str) -> "Calibration":
        """Check and take parsed JSON; `source` is the file's name in messages.

        CalibrationError on anything that is not as described above.
        """
        reader = _Reader(source)
        root = reader.mapping(obj, "the file")
        schema = root.get("schema")
        if schema != SCHEMA or isinstance(schema, bool):
            raise reader.problem("schema", schema, f"{SCHEMA}")
        servers = tuple(
            reader.profile(item, f"servers[{at}]")
            for at, item in enumerate(reader.items(root.get("servers"), "servers", 1, _SERVERS_MAX))
        )
        keys = [(server.name, server.role) for server in servers]
        if len(set(keys)) != len(keys):
            raise reader.problem(
                "servers", [k[0] or str(k[1]) for k in keys], "each name or role once"
            )
        layout = root.get("layout")
        if layout is not None:
            layout = Layout(reader.word(layout, "layout", tuple(Layout)))
        interference = root.get("interference")
        return cls(
            servers,
            reader.text(root.get("model"), "model"),
            layout,
            None if interference is None else reader.interference(interference),
        )


def _profile_json(server: ServerProfile) -> dict[str, Any]:
    return {
        "role": str(server.role),
        "name": server.name,
        "engine_version": server.engine_version,
        "gpus": server.gpus,
        "tpot": [
            {
                "sequences": p.sequences,
                "s": p.s,
                "low_s": p.low_s,
                "high_s": p.high_s,
                "windows": p.windows,
                **({} if p.mode is None else {"mode": p.mode}),
            }
            for p in server.tpot
        ],
        "ttft": [
            {"prefill_tokens": p.prefill_tokens, "s": p.s, "low_s": p.low_s, "high_s": p.high_s}
            for p in server.ttft
        ],
    }


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes JSON values of an unknown shape; every message says where, what and what is allowed."""

    source: str

    def problem(self, key: str, value: object, allowed: str) -> CalibrationError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CalibrationError(f"{self.source}: {key} is {shown}, expected {allowed}")

    def mapping(self, value: object, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.problem(key, value, "an object")
        return value

    def items(self, value: object, key: str, least: int, most: int) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise self.problem(key, value, f"a list of {least} to {most}")
        return value

    def text(self, value: object, key: str) -> str | None:
        if value is None or (isinstance(value, str) and 1 <= len(value) <= _TEXT_MAX):
            return value
        raise self.problem(key, value, f"a text of 1 to {_TEXT_MAX} characters, or null")

    def word(self, value: object, key: str, allowed: tuple[str, ...]) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        raise self.problem(key, value, "one of " + ", ".join(allowed))

    def number(self, value: object, key: str, least: float, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            pass
        elif least <= value <= most:  # not a number compares false with everything
            return float(value)
        raise self.problem(key, value, f"a number from {least:g} to {most:g}")

    def bounds(self, item: Mapping[str, Any], key: str) -> tuple[float, float, float]:
        s = self.number(item.get("s"), f"{key}.s", 1e-7, 3600)
        low = self.number(item.get("low_s", s), f"{key}.low_s", 0, s)
        return s, low, self.number(item.get("high_s", s), f"{key}.high_s", s, 36000)

    def profile(self, value: object, key: str) -> ServerProfile:
        item = self.mapping(value, key)
        tpot = self.items(item.get("tpot", []), f"{key}.tpot", 0, _POINTS_MAX)
        ttft = self.items(item.get("ttft", []), f"{key}.ttft", 0, _POINTS_MAX)
        return ServerProfile(
            Role(self.word(item.get("role"), f"{key}.role", tuple(Role))),
            self.text(item.get("name"), f"{key}.name"),
            self.text(item.get("engine_version"), f"{key}.engine_version"),
            self.text(item.get("gpus"), f"{key}.gpus"),
            tuple(self.tpot(point, f"{key}.tpot[{at}]") for at, point in enumerate(tpot)),
            tuple(self.ttft(point, f"{key}.ttft[{at}]") for at, point in enumerate(ttft)),
        )

    def tpot(self, value: object, key: str) -> TpotPoint:
        item = self.mapping(value, key)
        mode = item.get("mode")
        return TpotPoint(
            self.number(item.get("sequences"), f"{key}.sequences", 0.1, 100_000),
            *self.bounds(item, key),
            self.number(item.get("windows", 1), f"{key}.windows", 0, 1e9),
            None if mode is None else self.word(mode, f"{key}.mode", _MODES),
        )

    def ttft(self, value: object, key: str) -> TtftPoint:
        item = self.mapping(value, key)
        return TtftPoint(
            self.number(item.get("prefill_tokens"), f"{key}.prefill_tokens", 0, 1e9),
            *self.bounds(item, key),
        )

    def interference(self, value: object) -> Interference:
        key = "interference"
        item = self.mapping(value, key)
        slowdown = self.number(item.get("slowdown"), f"{key}.slowdown", 0.1, 100)
        low = self.number(item.get("low", slowdown), f"{key}.low", 0, slowdown)
        high = self.number(item.get("high", slowdown), f"{key}.high", slowdown, 1000)
        return Interference(slowdown, low, high)
