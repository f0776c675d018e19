"""What is learnt of all servers: a curve of time per token and a line of TTFT for each.

A server that switches speculation by itself has two curves, one for each mode, and the threshold
that it reports says which one holds at a load.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from router.core.calibration import (
    Calibration,
    Interference,
    ServerProfile,
    TpotPoint,
    TtftPoint,
)
from router.core.interference import ALONE_MAX, BESIDE_MIN, SHARED_MIN, InterferenceEstimate
from router.core.ledger import TtftSample
from router.core.performance import Curve, Point
from router.core.traffic import Traffic
from router.core.ttft import TtftLine
from router.core.tuning import Tuning
from router.core.types import EngineReport, Estimate, Layout, Role, ServerSpec
from router.core.windows import Window

CROSSOVER_MAX = 1024
# A calibration counts as so many windows at each of its points, at most.
_GIVEN_WEIGHT_MAX = 10.0
_SHOWN_LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TTFT_TOKENS = (256, 2048, 8192)


class ServerModel:
    """One server's curves. `threshold` is its own, None if it does not switch by itself."""

    def __init__(self, server: ServerSpec, tuning: Tuning, given: ServerProfile | None) -> None:
        self.name = server.name
        self.role = server.role
        self.threshold: int | None = None
        self.last_seen_at: float | None = None
        self.report: EngineReport | None = None
        self.reported_at: float | None = None
        points: dict[str, list[Point]] = {"on": [], "off": []}
        for point in given.tpot if given else ():
            weight = min(point.windows, _GIVEN_WEIGHT_MAX)
            points[point.mode or "on"].append(Point(point.sequences, point.s, weight))
        self.on = Curve(tuning, points["on"])
        self.off = Curve(tuning, points["off"])
        # Evidence on interference only: levels without and with another server's work beside.
        self.alone = Curve(tuning, points["on"])
        self.beside = Curve(tuning)
        self.ttft = TtftLine()
        for ttft in given.ttft if given else ():
            self.ttft.add(ttft.prefill_tokens, ttft.s)

    @property
    def known(self) -> bool:
        """Whether anything is known of its speed."""
        return self.on.known or self.off.known

    def curve(self, sequences: float) -> Curve:
        """Return the curve that holds at a load; the other one if that is all there is."""
        off = self.threshold is not None and sequences > self.threshold
        first, second = (self.off, self.on) if off else (self.on, self.off)
        return first if first.known or not second.known else second

    def observe(self, window: Window, slowdown: float) -> None:
        """Learn from a window; `slowdown` is what another server's work beside it costs."""
        self.last_seen_at = window.at
        if not window.usable:
            return
        weight = min(1.0, window.busy_s)
        at, sequences, seconds = window.at, window.sequences, window.seconds_per_token
        if window.overlap <= ALONE_MAX:
            self.alone.observe(at, sequences, seconds, weight)
        elif window.overlap >= BESIDE_MIN:
            self.beside.observe(at, sequences, seconds, weight)
        correction = 1 + (slowdown - 1) * window.overlap
        # What had to be corrected says less.
        weight /= 1 + 4 * abs(correction - 1)
        off = self.threshold is not None and sequences > self.threshold
        (self.off if off else self.on).observe(at, sequences, seconds / correction, weight)


class Learner:
    """The performance model of all servers, fed by windows and engine reports."""

    def __init__(
        self,
        servers: Sequence[ServerSpec] = (),
        *,
        layout: Layout = Layout.DISJOINT,
        calibration: Calibration | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.tuning = tuning or Tuning()
        self.declared = layout
        self.model = None if calibration is None else calibration.model
        self.traffic = Traffic()
        given = None if calibration is None else calibration.interference
        self._estimate = InterferenceEstimate(layout, given)
        self._interference = self._estimate.estimate([])
        self._calibrated = calibration is not None
        self._specs = {server.name: server for server in servers}
        self.servers = {
            server.name: ServerModel(
                server,
                self.tuning,
                calibration.profile(server.name, server.role) if calibration else None,
            )
            for server in servers
        }

    def observe(self, name: str, window: Window, ttft: Iterable[TtftSample] = ()) -> None:
        """Learn from one server's window and the times to first token that ended in it."""
        server = self.servers.get(name)
        if server is not None:
            server.observe(window, self._interference.slowdown)
            server.ttft.observe(ttft)

    @property
    def calibrated(self) -> bool:
        """Whether it started from a calibration."""
        return self._calibrated

    def engine_reported(self, name: str, now: float, report: EngineReport) -> None:
        """Take what an engine says of itself."""
        server = self.servers.get(name)
        if server is None:
            return
        server.report, server.reported_at = report, now
        switch = report.switch
        active = switch is not None and switch.state == "active"
        server.threshold = switch.threshold if switch is not None and active else None

    def forget(self, name: str) -> None:
        """Drop what is known of a server: it is not the one that it was."""
        self.servers[name] = ServerModel(self._specs[name], self.tuning, None)

    def tpot_s(self, server: str, sequences: float) -> Estimate | None:
        """Return seconds per output token with so many sequences in flight; None if unknown."""
        model = self.servers.get(server)
        if model is None or not model.known or sequences <= 0:
            return None
        return model.curve(sequences).estimate(sequences)

    def ttft_s(self, server: str, prefill_tokens: float) -> Estimate | None:
        """Return seconds to the first token with so many prompt tokens to prefill, own included."""
        model = self.servers.get(server)
        return None if model is None else model.ttft.estimate(prefill_tokens)

    def crossover(self) -> int | None:
        """Return the lowest load at which a base server is faster than a spec server, alone.

        None if one role is unknown; CROSSOVER_MAX if there is no such load below it.
        """
        spec, base = (
            next((s for s in self.servers.values() if s.role is role and s.known), None)
            for role in (Role.SPEC, Role.BASE)
        )
        if spec is None or base is None:
            return None
        for n in range(1, CROSSOVER_MAX):
            if base.curve(n).seconds(n) < spec.curve(n).seconds(n):
                return n
        return CROSSOVER_MAX

    def passed(self, elapsed_s: float, tokens: float, sequence_s: float) -> None:
        """Take what went on, on all servers together, since the last call."""
        self.traffic.passed(elapsed_s, tokens, sequence_s)
        pairs = [(server.alone, server.beside) for server in self.servers.values()]
        self._interference = self._estimate.estimate(pairs)

    def interference(self) -> Interference:
        """Return how much slower a server is while another works too."""
        return self._interference

    @property
    def layout(self) -> Layout:
        """The layout that the servers behave by: the declared one unless it is refuted."""
        known = self._interference
        if self.declared is Layout.DISJOINT and known.low > SHARED_MIN:
            return Layout.SHARED
        if self.declared is Layout.SHARED and known.high < SHARED_MIN:
            return Layout.DISJOINT
        return self.declared

    def learnt(self) -> Calibration:
        """Return what is known now, in the form of the state file."""
        return Calibration(
            tuple(self._profile(server) for server in self.servers.values()),
            self.model,
            self.layout,
            self.interference(),
        )

    def _profile(self, server: ServerModel) -> ServerProfile:
        tpot = []
        for mode, curve in (("on", server.on), ("off", server.off)):
            for point in curve.points():
                band = curve.estimate(point.sequences)
                s = point.seconds
                low, high = min(s, band.low), max(s, band.high)
                tpot.append(TpotPoint(point.sequences, s, low, high, point.weight, mode))
        ttft = []
        for tokens in _TTFT_TOKENS:
            estimate = server.ttft.estimate(tokens)
            if estimate is not None and estimate.value > 0:
                ttft.append(TtftPoint(tokens, estimate.value, estimate.low, estimate.high))
        return ServerProfile(server.role, server.name, tpot=tuple(tpot), ttft=tuple(ttft))

    def snapshot(self) -> dict[str, Any]:
        """Return all of it as JSON values, for people and for plots."""
        interference = self.interference()
        return {
            "layout": {"declared": str(self.declared), "learnt": str(self.layout)},
            "crossover": self.crossover(),
            "interference": {
                "slowdown": interference.slowdown,
                "low": interference.low,
                "high": interference.high,
            },
            "servers": {name: _server_json(server) for name, server in self.servers.items()},
        }


def _server_json(server: ServerModel) -> dict[str, Any]:
    curve = []
    for n in _SHOWN_LOADS if server.known else ():
        part = server.curve(n)
        e = part.estimate(n)
        point = {"sequences": n, "s": e.value, "low_s": e.low, "high_s": e.high}
        curve.append({**point, "windows": part.weight(n)})
    ttft = []
    for tokens in _TTFT_TOKENS:
        estimate = server.ttft.estimate(tokens)
        if estimate is not None:
            low, high = estimate.low, estimate.high
            ttft.append(
                {"prefill_tokens": tokens, "s": estimate.value, "low_s": low, "high_s": high}
            )
    return {
        "role": str(server.role),
        "threshold": server.threshold,
        "windows": server.on.windows + server.off.windows,
        "changes": server.on.changes + server.off.changes,
        "tpot": curve,
        "ttft": ttft,
    }
