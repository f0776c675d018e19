"""What other pairs of servers would do with the same load: the engine model in virtual time.

A closed loop: whenever the ramp has a free place, the next request of the workload goes to a server
by the router's own policy. No network, no router cost: these are the model's figures, not measured
ones.
"""

import heapq
import random
from collections.abc import Sequence
from itertools import count

from loadtest.engine_batch import Sequence as EngineSequence
from loadtest.engine_model import Engine, Gpu
from loadtest.engine_params import EngineParams
from loadtest.pacing import ClosedLoop
from loadtest.workload import Workload
from router.core.types import Layout, Policy, RequestShape, Role, ServerLoad

# How often a ramp that rises while nothing finishes is looked at.
_LOOK_S = 0.02


class _Loop:
    """The closed loop's state: engines, requests in flight on each, a heap of what happens next."""

    def __init__(
        self,
        servers: Sequence[tuple[Role, EngineParams]],
        policy: Policy,
        pacer: ClosedLoop,
        workload: Workload,
        layout: Layout,
    ) -> None:
        shared = Gpu()
        self._engines = [
            Engine(params, shared if layout is Layout.SHARED else Gpu()) for _, params in servers
        ]
        self._roles = [role for role, _ in servers]
        self._in_flight = [0] * len(servers)
        self._policy = policy
        self._pacer = pacer
        self._workload = workload
        self._rng = random.Random(workload.seed)  # noqa: S311 - a simulation
        self._started = 0
        self._events: list[tuple[float, int, Engine | None]] = []
        self._order = count()
        self._busy: set[int] = set()

    def tokens(self, duration_s: float) -> int:
        """Run for so many seconds of virtual time and return the tokens made."""
        self._at(0.0, None)
        while self._events:
            now, _, engine = heapq.heappop(self._events)
            if now > duration_s:
                break
            if engine is None:
                self._at(now + _LOOK_S, None)
            else:
                place = self._engines.index(engine)
                self._busy.discard(place)
                self._in_flight[place] -= len(engine.end(self._rng).ended)
            self._submit(now)
            self._step(now)
        return sum(engine.totals.output_tokens for engine in self._engines)

    def _at(self, when: float, engine: Engine | None) -> None:
        heapq.heappush(self._events, (when, next(self._order), engine))

    def _submit(self, now: float) -> None:
        for _ in self._pacer.due(now, self._started, sum(self._in_flight)):
            ask = self._workload.ask(self._started)
            self._started += 1
            loads = tuple(
                ServerLoad(str(place), role, decode_sequences=in_flight)
                for place, (role, in_flight) in enumerate(
                    zip(self._roles, self._in_flight, strict=True)
                )
            )
            shape = RequestShape(prompt_tokens=ask.prompt_tokens, max_tokens=ask.output_tokens)
            place = int(self._policy.choose(shape, loads, loads, now).server)
            self._engines[place].submit(EngineSequence(ask.prompt_tokens, ask.output_tokens))
            self._in_flight[place] += 1

    def _step(self, now: float) -> None:
        for place, engine in enumerate(self._engines):
            if place not in self._busy and (duration_s := engine.begin()) is not None:
                self._busy.add(place)
                self._at(now + duration_s, engine)


def simulate(
    servers: Sequence[tuple[Role, EngineParams]],
    policy: Policy,
    pacer: ClosedLoop,
    workload: Workload,
    layout: Layout = Layout.DISJOINT,
) -> float:
    """Return the tokens per second of these servers under a load that lasts `pacer.duration_s`."""
    if pacer.duration_s is None:
        raise ValueError("a simulated run needs a duration")
    loop = _Loop(servers, policy, pacer, workload, layout)
    return loop.tokens(pacer.duration_s) / pacer.duration_s
