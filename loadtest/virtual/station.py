"""A simulated server: what it is, what may happen to it, and its engine at work."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from loadtest.engine_model import Engine, Gpu
from loadtest.engine_params import EngineParams
from loadtest.switching import SwitchingEngine, make_engine
from router.core.types import EngineReport, Role, ServerSpec

# More than one H200 was measured with. SGLang's own limit under speculation, 48, is below most
# crossings.
RUNNING_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Server:
    """One simulated server. `threshold`: with the plugin, off above so many running requests."""

    name: str
    role: Role
    params: EngineParams
    threshold: int | None = None
    running_requests: int = RUNNING_REQUESTS


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a server at a time: its new model, new slowness, death or return.

    `params` and `slowness` None: as before.
    """

    at_s: float
    server: str
    params: EngineParams | None = None
    slowness: float | None = None
    alive: bool | None = None


def server_specs(servers: Sequence[Server]) -> list[ServerSpec]:
    """Return the servers as the router's configuration would have them."""
    return [ServerSpec(s.name, s.role, f"http://{s.name}") for s in servers]


@dataclass(slots=True)
class Station:
    """One server's engine, and when its step under way ends: never, while there is none.

    `slowness` is without noise. Tokens of an engine that was lost still count.
    """

    server: Server
    gpu: Gpu
    noise: random.Random
    engine: Engine = field(init=False)
    due_s: float = inf
    began_s: float = 0.0
    slowness: float = 1.0
    alive: bool = True
    lost_tokens: int = 0

    def __post_init__(self) -> None:
        self.engine = self.make_engine()

    def make_engine(self) -> Engine:
        """Return the server's engine, new and idle."""
        server = self.server
        return make_engine(
            server.params,
            self.gpu,
            server.threshold,
            max_running_requests=server.running_requests,
        )

    @property
    def tokens(self) -> int:
        """Output tokens since the start of the run."""
        return self.lost_tokens + self.engine.totals.output_tokens

    def begin(self, now: float, horizon_s: float) -> None:
        """Start the next step if none is under way."""
        if self.due_s == inf and self.alive:
            duration_s = self.engine.begin(horizon_s - now)
            if duration_s is not None:
                self.began_s, self.due_s = now, now + duration_s

    def cut(self, now: float) -> None:
        """Let a row of steps end with the one under way now."""
        if self.due_s < inf:
            duration_s = self.engine.cut(now - self.began_s)
            assert duration_s is not None
            self.due_s = self.began_s + duration_s

    def report(self) -> EngineReport:
        """Return what the engine says of itself."""
        engine = self.engine
        return EngineReport(
            running=engine.num_running,
            queued=len(engine.waiting),
            switch=engine.report() if isinstance(engine, SwitchingEngine) else None,
        )
