"""The one loop in virtual time: a load, the router's decisions, and engine models that serve it.

Everything that decides is the router's own code, called as the router calls it: `Steering.decide`,
leases of the `Ledger`, `Steering.observe` every OBSERVE_S, `Steering.engine_reported` every
REPORT_S, and the servers' health. There are no sockets: what the router and the network cost is
not in it.

The policy sees of a request what the router would: its prompt, not how much it will answer.
"""

import random
from collections.abc import Sequence
from math import exp, inf
from typing import Protocol

from loadtest.engine_batch import Sequence as EngineSequence
from loadtest.engine_model import Gpu
from loadtest.pacing import ClosedLoop, Pacer
from loadtest.virtual.record import Request, Run, Tick
from loadtest.virtual.station import Event, Server, Station, server_specs
from loadtest.workload import Ask, Workload
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.steering import Steering
from router.core.types import Layout, Outcome, Policy, RequestShape

OBSERVE_S = 0.25
REPORT_S = 1.0
# How often a load whose level changes by the clock is looked at.
LOOK_S = 0.02
_DEAD = "connection refused"


class Asks(Protocol):
    """Numbered requests: `Workload`, for one."""

    def ask(self, index: int) -> Ask:
        """Return what request number `index` asks for."""
        ...


class World:
    """Servers, the router's core in front of them, and the time."""

    def __init__(
        self,
        servers: Sequence[Server],
        policy: Policy,
        layout: Layout = Layout.DISJOINT,
        *,
        learner: Learner | None = None,
        seed: int = 1,
        noise: float = 0.0,
    ) -> None:
        """`noise` is the standard deviation of each server's speed, drawn anew at every look."""
        shared = Gpu()
        self._stations = [
            Station(
                server,
                shared if layout is Layout.SHARED else Gpu(),
                random.Random(f"{seed}/{server.name}/noise"),  # noqa: S311 - a simulation
            )
            for server in servers
        ]
        self._by_name = {station.server.name: station for station in self._stations}
        specs = server_specs(servers)
        self.ledger = Ledger(specs)
        self._health = {spec.name: ServerHealth() for spec in specs}
        for health in self._health.values():
            health.probe_ok(0.0)
        self.steering = Steering(specs, policy, self.ledger, self._health, learner=learner)
        self._shared = layout is Layout.SHARED
        self._noise = noise
        self._luck = random.Random(f"{seed}/luck")  # noqa: S311 - a simulation
        self._now = 0.0
        self._next_tick_s = 0.0
        self._next_report_s = REPORT_S
        self._requests: list[Request] = []
        self._ticks: list[Tick] = []
        self._in_flight = 0
        self._in_flight_s: dict[int, float] = {}
        self._mode_switches: list[float] = []

    def run(
        self,
        pacer: Pacer,
        workload: Asks,
        until_s: float = inf,
        events: Sequence[Event] = (),
        looks_s: Sequence[float] | None = None,
    ) -> Run:
        """Serve the load up to a time, or until all of it is answered.

        `looks_s` are the times at which the pacer's level changes by itself; None: look often.
        """
        waiting = sorted(events, key=lambda event: event.at_s, reverse=True)
        looks = None if looks_s is None else sorted(looks_s, reverse=True)
        look_s = 0.0
        while True:
            arrival_s = pacer.next_s(len(self._requests))
            station = min(self._stations, key=_due)
            event_s = waiting[-1].at_s if waiting else inf
            now = min(
                station.due_s,
                self._next_tick_s,
                inf if arrival_s is None else max(arrival_s, self._now),
                look_s,
                event_s,
            )
            if now > until_s:
                self._pass_time(until_s)
                break
            if not self._in_flight and pacer.over(now, len(self._requests)):
                break
            self._pass_time(now)
            if station.due_s <= now:
                self._end_step(station)
            elif event_s <= now:
                self._happen(waiting.pop())
            elif self._next_tick_s <= now:
                self._tick()
            elif look_s <= now:
                look_s = now + LOOK_S if looks is None else looks.pop() if looks else inf
            for intended_s in pacer.due(now, len(self._requests), self._in_flight):
                ask = workload.ask(len(self._requests))
                self._requests.append(request := Request(ask, intended_s))
                self._send(request)
            self._begin()
        return self._result(until_s)

    def _pass_time(self, now: float) -> None:
        level = self._in_flight
        self._in_flight_s[level] = self._in_flight_s.get(level, 0.0) + now - self._now
        self._now = now

    def _end_step(self, station: Station) -> None:
        now = self._now
        station.due_s = inf
        step = station.engine.end(self._luck, each=False)
        for sequence, _ in step.emitted:
            request = sequence.key
            assert isinstance(request, Request)
            assert request.lease is not None
            request.lease.first_token(now)
            if request.first_s is None:
                request.first_s = now
                self._health[station.server.name].last_token_at = now
        for sequence in step.ended:
            request = sequence.key
            assert isinstance(request, Request)
            assert request.lease is not None
            request.end_s = now
            request.lease.release(Outcome.OK, now)
            self._in_flight -= 1
        if self._shared and not station.engine.has_work:
            self._cut_all()

    def _send(self, request: Request, exclude: frozenset[str] = frozenset()) -> None:
        """Decide and submit; try another server where one refuses, as the router does."""
        ask, now = request.ask, self._now
        shape = RequestShape(prompt_tokens=ask.prompt_tokens)
        switches = self.steering.policy.switches
        decision = self.steering.decide(shape, now, exclude)
        if self.steering.policy.switches != switches:
            self._mode_switches.append(now)
        if decision is None:
            request.failed, request.end_s = True, now
            return
        station = self._by_name[decision.server]
        lease = self.ledger.acquire(decision.server, shape, now)
        if not station.alive:
            self._health[decision.server].transport_error(now, _DEAD)
            lease.release(Outcome.UPSTREAM_ERROR, now)
            self._send(request, exclude | {decision.server})
            return
        request.server, request.lease = decision.server, lease
        self._in_flight += 1
        if self._shared and not station.engine.has_work:
            self._cut_all()
        station.cut(now)
        station.engine.submit(EngineSequence(ask.prompt_tokens, ask.output_tokens, key=request))

    def _cut_all(self) -> None:
        for station in self._stations:
            station.cut(self._now)

    def _begin(self) -> None:
        for station in self._stations:
            station.begin(self._now, self._next_tick_s)

    def _tick(self) -> None:
        now = self._now
        stations = self._stations
        tokens = {station.server.name: float(station.tokens) for station in stations}
        switches = self.steering.policy.switches
        self.steering.observe(now, tokens)
        if self.steering.policy.switches != switches:
            self._mode_switches.append(now)
        if now >= self._next_report_s:
            self._next_report_s = now + REPORT_S
            for station in stations:
                if station.alive:
                    self._health[station.server.name].probe_ok(now)
                    self.steering.engine_reported(station.server.name, now, station.report())
        self._ticks.append(
            Tick(
                now,
                tuple(station.tokens for station in stations),
                tuple(load.sequences for load in self.ledger.loads()),
            )
        )
        if self._noise:
            for station in stations:
                self._vary(station)
        # Not by adding up, whose rounding would drift.
        self._next_tick_s = len(self._ticks) * OBSERVE_S

    def _vary(self, station: Station) -> None:
        # Its mean *speed* is 1, so that noise takes and gives nothing on average.
        sd = self._noise
        station.engine.slowness = station.slowness * exp(sd * station.noise.gauss() + sd * sd / 2)

    def _happen(self, event: Event) -> None:
        station = self._by_name[event.server]
        self._cut_all()
        if event.params is not None:
            station.engine.change(event.params)
        if event.slowness is not None:
            station.slowness = station.engine.slowness = event.slowness
        if event.alive is True and not station.alive:
            station.alive = True
            self._health[event.server].probe_ok(self._now)
        elif event.alive is False and station.alive:
            self._lose(station)

    def _lose(self, station: Station) -> None:
        """Break every connection: what has a token fails, what has none is sent elsewhere."""
        now, name = self._now, station.server.name
        station.alive, station.due_s = False, inf
        station.lost_tokens += station.engine.totals.output_tokens
        station.gpu.leave(station.engine)
        station.engine = station.make_engine()
        for request in self._requests:
            if request.server != name or request.end_s is not None:
                continue
            assert request.lease is not None
            request.lease.release(Outcome.UPSTREAM_ERROR, now)
            self._health[name].transport_error(now, _DEAD)
            self._in_flight -= 1
            if request.first_s is None:
                self._send(request, frozenset({name}))
            else:
                request.failed, request.end_s = True, now

    def _result(self, until_s: float) -> Run:
        return Run(
            servers=tuple(self._by_name),
            duration_s=until_s if until_s < inf else self._now,
            tokens=sum(station.tokens for station in self._stations),
            requests=tuple(self._requests),
            ticks=tuple(self._ticks),
            in_flight_s=self._in_flight_s,
            mode_switches=tuple(self._mode_switches),
            leases_left=len(self.ledger),
        )


def _due(station: Station) -> float:
    return station.due_s


def rate_tok_s(
    servers: Sequence[Server],
    policy: Policy,
    pacer: ClosedLoop,
    workload: Workload,
    layout: Layout = Layout.DISJOINT,
) -> float:
    """Return the tokens per second under a closed loop that lasts `pacer.duration_s`."""
    if pacer.duration_s is None:
        raise ValueError("a rate over time needs a duration")
    world = World(servers, policy, layout, seed=workload.seed)
    run = world.run(pacer, workload, pacer.duration_s)
    return run.tokens / pacer.duration_s
