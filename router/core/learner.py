"""What is learnt of all servers: a curve of time per token and a line of TTFT for each.

A server that switches speculation by itself has two curves, one for each mode, and the threshold
that it reports says which one holds at a load.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from router.core.calibration import (
    Calibration,
    Interference,
    ServerProfile,
    TpotPoint,
    TtftPoint,
)
from router.core.context import ContextTerm
from router.core.interference import ALONE_MAX, BESIDE_MIN, SHARED_MIN, InterferenceEstimate
from router.core.ledger import TtftSample
from router.core.performance import Curve, Point
from router.core.regret import Rate, Regret
from router.core.traffic import Traffic
from router.core.ttft import TtftLine
from router.core.tuning import Tuning
from router.core.types import EngineReport, Estimate, Layout, Role, ServerSpec
from router.core.windows import Window

CROSSOVER_MAX = 1024
# An engine's report holds for so long, and says something where so many in a row agree.
_REPORT_AGE_S_MAX = 10.0
_REPORTS_AGREE = 3
_COUNT_MAX = 100_000
# A window that another server slowed more than this says little of the server alone.
_CORRECTION_MAX = 1.2
# At most so much of a window is put down to unusual prefill.
_PREFILL_SHARE_MAX = 0.5
# A calibration counts as so many windows at each of its points, at most: few where traffic soon
# corrects a wrong one, more where acting on a wrong window means a change of the role.
_GIVEN_WEIGHT_MAX = {Layout.DISJOINT: 2.0, Layout.SHARED: 10.0}
_SHOWN_LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TTFT_TOKENS = (256, 2048, 8192)


class ServerModel:
    """One server's curves. `threshold` is its own, None if it does not switch by itself."""

    def __init__(
        self,
        server: ServerSpec,
        tuning: Tuning,
        given: ServerProfile | None = None,
        given_weight_max: float = 0.0,
    ) -> None:
        self._tuning = tuning
        self.name = server.name
        self.role = server.role
        self.threshold: int | None = None
        self.last_seen_at: float | None = None
        self.context = ContextTerm()
        self._reported_at: float | None = None
        self._strangers: deque[int] = deque(maxlen=_REPORTS_AGREE)
        points: dict[str, list[Point]] = {"on": [], "off": []}
        for point in given.tpot if given else ():
            weight = min(point.windows, given_weight_max)
            points[point.mode or "on"].append(Point(point.sequences, point.s, weight))
        self.on = Curve(tuning, points["on"])
        self.off = Curve(tuning, points["off"])
        # Evidence on interference only: levels without and with another server's work beside.
        self.alone = Curve(tuning)
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
        if off or not self.on.known:
            return self.off if self.off.known else self.on
        return self.on

    def unseen(self, elapsed_s: float) -> None:
        """Nothing was seen of the server for so long: in the end, what was not borne out goes."""
        self.on.unseen(elapsed_s)
        self.off.unseen(elapsed_s)

    def observe(self, window: Window, seconds: float, slowdown: float) -> None:
        """Learn from a window of so many seconds per token; `slowdown` is what another server's
        work beside it costs.
        """
        weight = min(1.0, window.busy_s)
        at = window.at
        sequences = window.sequences + self.bypassing(at)
        self._compare(window, sequences, seconds, weight)
        correction = 1 + (slowdown - 1) * window.overlap
        seconds /= correction
        if correction > _CORRECTION_MAX:
            return
        curve = self._curve_for_mode(sequences)
        if curve.known:
            off_s = seconds - curve.seconds(sequences)
            seconds -= self.context.seconds(sequences, window.context_tokens)
            self.context.observe(sequences, window.context_tokens, off_s, weight)
        curve.observe(at, sequences, seconds, weight)

    def _compare(self, window: Window, sequences: float, seconds: float, weight: float) -> None:
        """Keep the evidence on interference. A server that has changed while nothing else did makes
        the other half of it void.
        """
        changes = self.alone.changes, self.beside.changes
        if window.overlap <= ALONE_MAX:
            self.alone.observe(window.at, sequences, seconds, weight)
        elif window.overlap >= BESIDE_MIN:
            self.beside.observe(window.at, sequences, seconds, weight)
        if self.alone.changes > changes[0]:
            self.beside = Curve(self._tuning)
        if self.beside.changes > changes[1]:
            self.alone = Curve(self._tuning)

    def reported(self, now: float, report: EngineReport, own_sequences: int) -> None:
        """Take what the engine says of itself, as far as it can be true.

        What it runs and queues beyond the router's own count is other clients' work. A report and
        the own count are never of the very same moment, so the least of a few in a row counts.
        """
        counts = [n for n in (report.running, report.queued) if _is_count(n)]
        if _is_count(report.running):
            self._strangers.append(max(0, sum(counts) - own_sequences))
            self._reported_at = now
        switch = report.switch
        active = switch is not None and switch.state == "active" and _is_count(switch.threshold)
        self.threshold = switch.threshold if switch is not None and active else None

    def bypassing(self, now: float) -> int:
        """Return the sequences that other clients have in flight, 0 where none is known."""
        if self._reported_at is None or now - self._reported_at > _REPORT_AGE_S_MAX:
            return 0
        return min(self._strangers) if len(self._strangers) == _REPORTS_AGREE else 0

    def _curve_for_mode(self, sequences: float) -> Curve:
        off = self.threshold is not None and sequences > self.threshold
        return self.off if off else self.on


def _is_count(value: object) -> TypeGuard[int]:
    """Whether it can be a number of sequences: what an engine sends is not trusted to be one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MAX


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
        self.regret = Regret()
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
                _GIVEN_WEIGHT_MAX[layout],
            )
            for server in servers
        }
        # What each prompt token takes to prefill. A server's own line comes out flat where prompts
        # wait for others that are half done, never steep; and servers that differ only in
        # speculation prefill alike, while a difference would sort prompts by their length.
        self.prefill_token_s = self._greatest_prefill_token_s()

    def observe(self, name: str, window: Window, ttft: Iterable[TtftSample] = ()) -> None:
        """Learn from one server's window and the times to first token that ended in it."""
        server = self.servers.get(name)
        if server is not None:
            server.last_seen_at = window.at
            if window.usable:
                seconds = window.seconds_per_token - self._unusual_prefill_s(window)
                server.observe(window, seconds, self._interference.slowdown)
            server.ttft.observe(ttft)
            self.prefill_token_s = self._greatest_prefill_token_s()

    def _greatest_prefill_token_s(self) -> float:
        return max((server.ttft.token_s for server in self.servers.values()), default=0.0)

    def _unusual_prefill_s(self, window: Window) -> float:
        """Return what prefill took of each token beyond the traffic's mean, in seconds.

        A prefill blocks all sequences. A curve holds the traffic's mean share of it; the luck of a
        window, which may have no long prompt or two, only blurs it.
        """
        traffic = self.traffic
        if traffic.tokens_per_sequence <= 0:
            return 0.0
        usual = traffic.prompt_per_sequence * window.tokens / traffic.tokens_per_sequence
        blocked_s = self.prefill_token_s * (window.prefilled_tokens - usual)
        most = _PREFILL_SHARE_MAX * window.busy_s
        blocked_s = min(max(blocked_s, -most), most)
        return blocked_s * window.sequences / window.tokens

    @property
    def calibrated(self) -> bool:
        """Whether it started from a calibration."""
        return self._calibrated

    def engine_reported(
        self, name: str, now: float, report: EngineReport, own_sequences: int
    ) -> None:
        """Take what an engine says of itself, and how many sequences the router has there."""
        server = self.servers.get(name)
        if server is not None:
            server.reported(now, report, own_sequences)

    def forget(self, name: str) -> None:
        """Drop what is known of a server: it is not the one that it was."""
        self.servers[name] = ServerModel(self._specs[name], self.tuning)

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
        self._account(elapsed_s, tokens, sequence_s)
        pairs = [(server.alone, server.beside) for server in self.servers.values()]
        self._interference = self._estimate.estimate(pairs)

    def _account(self, elapsed_s: float, tokens: float, sequence_s: float) -> None:
        rates = [self._rate(role) for role in Role]
        spec, base = rates
        if elapsed_s > 0 and spec is not None and base is not None:
            slowdown = self._interference.slowdown
            self.regret.add(elapsed_s, sequence_s / elapsed_s, tokens, spec, base, slowdown)

    def _rate(self, role: Role) -> Rate | None:
        """Return a role's token rate by its sequences, spread evenly; None if it is unknown."""
        servers = [s for s in self.servers.values() if s.role is role]
        if not servers or not all(server.known for server in servers):
            return None

        def rate(sequences: float) -> float:
            each = max(sequences / len(servers), 1.0)
            part = min(1.0, sequences / len(servers))
            return sum(part * each / server.curve(each).seconds(each) for server in servers)

        return rate

    def interference(self) -> Interference:
        """Return how much slower a server is while another works too."""
        return self._interference

    @property
    def contrast_known(self) -> bool:
        """Whether a server was seen alone and beside another's work, at comparable loads."""
        return self._estimate.contrast_known

    @property
    def layout(self) -> Layout:
        """The layout that the servers behave by: the declared one unless it is refuted."""
        known = self._interference
        if not self.tuning.learn_layout:
            return self.declared
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
            "regret": self.regret.shares(),
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
