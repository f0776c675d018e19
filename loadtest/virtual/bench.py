"""One case of a scenario on one seed, under any policy: the routed ones and all their rivals.

All arms of a case get the same requests, the same luck of the seed and the same noise at the same
time. What a rival may choose with hindsight (its threshold) is searched for this very case.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil

from loadtest.engine_model import Gpu
from loadtest.pacing import ClosedLoop, OpenLoop, Pacer, Ramp
from loadtest.reading import Arrival
from loadtest.virtual.curves import Curve, best_split, capacity_tok_s, measure
from loadtest.virtual.loop import World
from loadtest.virtual.record import Run
from loadtest.virtual.rivals import KnownCurves, RoundRobin
from loadtest.virtual.scenario import Scenario, Start
from loadtest.virtual.station import Event, Server, server_specs
from loadtest.virtual.synthetic import synthetic_trace
from loadtest.workload import Ask, Lengths, Recorded, Workload
from router.core.calibration import (
    Calibration,
    Interference,
    ServerProfile,
    TpotPoint,
    TtftPoint,
)
from router.core.learner import Learner
from router.core.policy import make_policy
from router.core.tuning import Tuning
from router.core.types import Layout, Policy

# A calibrated curve's points count as so many windows, and are known within so much.
_WINDOWS = 10.0
_BAND = 0.02
_MISJUDGED = 1.3
_TTFT_TOKENS = (256, 2048, 8192)
THRESHOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario at one of its levels or demands, or its course. `rows`: a trace read from a file.

    `layout` and `tuning` are what the router is told, where that is not the truth or the default.
    """

    scenario: Scenario
    level: int | None = None
    demand: float | None = None
    rows: tuple[Arrival, ...] | None = None
    layout: Layout | None = None
    tuning: Tuning | None = None

    @property
    def label(self) -> str:
        """What distinguishes it among the cases of its scenario."""
        if self.level is not None:
            return f"{self.level} requests"
        return "course" if self.demand is None else f"demand {self.demand:g}"


def cases(scenario: Scenario, rows: tuple[Arrival, ...] | None = None) -> list[Case]:
    """Return a scenario's cases."""
    if scenario.levels:
        return [Case(scenario, level=level) for level in scenario.levels]
    if scenario.demands:
        return [Case(scenario, demand=demand, rows=rows) for demand in scenario.demands]
    return [Case(scenario)]


class _Remembered:
    """A workload whose requests are drawn once for all arms."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._asks: list[Ask] = []

    def ask(self, index: int) -> Ask:
        """Return what request number `index` asks for."""
        while len(self._asks) <= index:
            self._asks.append(self._workload.ask(len(self._asks)))
        return self._asks[index]


class Bench:
    """The load of one case on one seed, ready to be run under any policy."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.scenario = scenario = case.scenario
        self.seed = seed
        self.until_s = scenario.duration_s
        self._looks_s: Sequence[float] | None = ()
        if case.demand is not None:
            self._pacer, self._workload = self._replay(case.demand)
        else:
            points = scenario.course or ((0.0, float(case.level or 0)),)
            self._pacer = ClosedLoop(Ramp(points), duration_s=self.until_s)
            self._workload = _Remembered(Workload("simulated", scenario.lengths, seed))
            held = all(a[1] == b[1] or a[0] == b[0] for a, b in pairwise(points))
            self._looks_s = [at for at, _ in points] if held else None

    _pacer: Pacer

    def routed(self, start: Start) -> Run:
        """Run the learnt policy, from what `start` says is known."""
        case = self.case
        servers = self.scenario.servers
        learner = Learner(
            server_specs(servers),
            layout=case.layout or self.scenario.layout,
            calibration=None if start is Start.COLD else self._calibration(start),
            tuning=case.tuning,
        )
        return self._run(servers, make_policy("marginal", learner=learner), learner)

    def fixed(self, policy: str, threshold: int = 0) -> Run:
        """Run a policy that the router ships, other than the learnt one."""
        return self._run(self.scenario.servers, make_policy(policy, threshold=threshold))

    def round_robin(self) -> Run:
        """Run servers in turn."""
        return self._run(self.scenario.servers, RoundRobin())

    def pair(self, server: Server) -> Run:
        """Run two of one server, each with the fewer requests in turn."""
        pair = tuple(replace(server, name=f"{server.name}-{place}") for place in (1, 2))
        return self._run(pair, make_policy("least-inflight"))

    def known(self) -> Run:
        """Run the marginal rule on the true curves, told of every change at once."""
        return self._run(self.scenario.servers, KnownCurves(self._phases))

    def split(self) -> Run:
        """Run the best split of a held level, by the true curves: so many stay on spec."""
        spec, base = self.curves
        on_spec, _ = best_split(spec, base, self.case.level or 0)
        return self.fixed("split", on_spec)

    def best(self, policy: str, badness: Callable[[Run], float]) -> tuple[int, Run]:
        """Return the threshold with the least badness, by climbing from the crossing, and its run.

        Runs for neighbouring thresholds differ little, so that a climb finds the best or next to
        it.
        """
        found: dict[int, tuple[float, Run]] = {}

        def look(at: int) -> float:
            if at not in found:
                run = self.fixed(policy, THRESHOLDS[at])
                found[at] = (badness(run), run)
            return found[at][0]

        at = self._crossing_place
        while True:
            near = [place for place in (at - 1, at, at + 1) if 0 <= place < len(THRESHOLDS)]
            best = min(near, key=look)
            if best == at:
                return THRESHOLDS[at], found[at][1]
            at = best

    @cached_property
    def curves(self) -> tuple[Curve, Curve]:
        """The true curves of spec and base at the start, as far as the load reaches."""
        spec, base = self.scenario.servers
        return self._measure(spec), self._measure(base)

    def _measure(self, server: Server) -> Curve:
        case = self.case
        if case.demand is not None:
            return measure(server, self.lengths)
        highest = max((level for _, level in self.scenario.course), default=case.level or 1)
        return measure(server, self.lengths, ceil(highest))

    @cached_property
    def lengths(self) -> Lengths:
        """Where the requests' lengths come from: a trace's own, if it was read from a file."""
        rows = self.case.rows
        return self.scenario.lengths if rows is None else self._fitting(rows)

    @property
    def _crossing_place(self) -> int:
        spec, base = self.curves
        slower = (k for k, n in enumerate(THRESHOLDS) if spec.table_s[n] > base.table_s[n])
        return next(slower, len(THRESHOLDS) - 1)

    @cached_property
    def _phases(self) -> list[tuple[float, dict[str, Curve]]]:
        servers = {server.name: server for server in self.scenario.servers}
        slowness = dict.fromkeys(servers, 1.0)

        def curves() -> dict[str, Curve]:
            return {
                name: self._measure(server).scaled(slowness[name])
                for name, server in servers.items()
            }

        phases = [(-1.0, curves())]
        for event in sorted(self.scenario.events, key=_at):
            if event.slowness is not None:
                slowness[event.server] = event.slowness
            if event.params is not None:
                servers[event.server] = replace(servers[event.server], params=event.params)
            phases.append((event.at_s, curves()))
        return phases

    def _calibration(self, start: Start) -> Calibration:
        factor = _MISJUDGED if start is Start.MISJUDGED else 1.0
        return calibration_of(
            [
                (server, measure(server, self.lengths).scaled(slowness))
                for server, slowness in zip(self.scenario.servers, (factor, 1.0), strict=True)
            ],
            self.case.layout or self.scenario.layout,
        )

    def _replay(self, demand: float) -> tuple[Pacer, "_Remembered"]:
        rows = self.case.rows or synthetic_trace(self.scenario.requests, self.seed)
        tokens = sum(row.output_tokens for row in rows)
        span_s = rows[-1].at_s - rows[0].at_s
        wanted_tok_s = demand * max(capacity_tok_s(curve) for curve in self.curves)
        scale = tokens / wanted_tok_s / span_s
        times_s = array("d", ((row.at_s - rows[0].at_s) * scale for row in rows))
        self.until_s = times_s[-1]
        workload = Workload("simulated", self._fitting(rows), self.seed)
        return OpenLoop(times_s), _Remembered(workload)

    def _fitting(self, rows: Sequence[Arrival]) -> Recorded:
        """Return a trace's lengths, its prompts cut to what an engine would not refuse."""
        room = min(server.params.context_tokens for server in self.scenario.servers)
        return Recorded(
            tuple(
                (min(row.prompt_tokens, room - row.output_tokens), row.output_tokens)
                for row in rows
            )
        )

    def _run(
        self, servers: Sequence[Server], policy: Policy, learner: Learner | None = None
    ) -> Run:
        scenario = self.scenario
        world = World(
            servers,
            policy,
            scenario.layout,
            learner=learner,
            seed=self.seed,
            noise=scenario.noise,
        )
        names = {server.name for server in servers}
        events = [event for event in scenario.events if event.server in names]
        return world.run(self._pacer, self._workload, self.until_s, events, self._looks_s)


def calibration_of(known: Sequence[tuple[Server, Curve]], layout: Layout) -> Calibration:
    """Return what a calibration file would hold of servers with these curves."""
    slowdown = 1.0 if layout is Layout.DISJOINT else 1 / Gpu.CONTENDED_SHARE_OF_TWO
    return Calibration(
        tuple(_profile(server, curve) for server, curve in known),
        layout=layout,
        interference=Interference(slowdown, slowdown * (1 - _BAND), slowdown * (1 + _BAND)),
    )


def _profile(server: Server, curve: Curve) -> ServerProfile:
    def mode(level: int) -> str | None:
        if server.threshold is None:
            return None
        return "on" if level <= server.threshold else "off"

    params = server.params
    points = (
        (level, level / rate) for level, rate in zip(curve.levels, curve.rates_tok_s, strict=True)
    )
    return ServerProfile(
        server.role,
        tpot=tuple(
            TpotPoint(n, s, s * (1 - _BAND), s * (1 + _BAND), _WINDOWS, mode(n)) for n, s in points
        ),
        ttft=tuple(
            TtftPoint(tokens, s, s * (1 - _BAND), s * (1 + _BAND))
            for tokens in _TTFT_TOKENS
            if (s := params.prefill_pass_s + params.prefill_token_s * tokens) > 0
        ),
    )


def _at(event: Event) -> float:
    return event.at_s
