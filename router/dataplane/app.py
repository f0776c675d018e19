"""The composition root: every part is made and wired here, and nowhere else."""

import logging
import time
from collections.abc import Callable

from router import __version__
from router.core.admission import Priority
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.override import PolicyInForce
from router.core.steering import Steering
from router.core.tokens import TokenModel
from router.core.types import ServerSpec
from router.dataplane.admission_metrics import AdmissionSources
from router.dataplane.asgi import Receive, Scope, Send
from router.dataplane.auth import Guard, by_server
from router.dataplane.control import TO_ALL, create_control
from router.dataplane.cors import Cors
from router.dataplane.door import Door
from router.dataplane.engine_loads import LoadPoller
from router.dataplane.learning import Learning, Memory
from router.dataplane.lifecycle import Lifecycle, Stage
from router.dataplane.logs import log_request, set_level
from router.dataplane.loop_lag import LoopLag
from router.dataplane.metrics import Metrics, Sources
from router.dataplane.operations_metrics import OperationsSources
from router.dataplane.parts import Parts
from router.dataplane.policies import policy_of, same_policy
from router.dataplane.probe import Prober
from router.dataplane.record import RequestRecord
from router.dataplane.relay import Relay, RelayLimits
from router.dataplane.reload import InForce
from router.dataplane.server import Upstream
from router.dataplane.state_file import StateFile
from router.dataplane.steering_metrics import SteeringSources
from router.dataplane.upstream import Pool
from router.dataplane.vocabularies import VocabularyReader
from router.settings import Access, Settings

_log = logging.getLogger("crossover")


class _Observer:
    """Hands what the relay reports to the metrics and to the log."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def gap_observer(self, server: str) -> Callable[[float], None]:
        return self._metrics.gap_observer(server)

    def finished(self, record: RequestRecord) -> None:
        self._metrics.finished(record)
        log_request(record)


class CrossoverApp:
    """The ASGI application: the router's own paths, and its life. All else is `relay`'s."""

    def __init__(
        self, relay: Relay, vocabularies: VocabularyReader, lag: LoopLag, parts: Parts
    ) -> None:
        self.parts = parts
        self.relay = relay
        self.in_force = parts.in_force
        self.lifecycle = parts.lifecycle
        self._vocabularies = vocabularies
        self._lag = lag
        self._control = create_control(parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the application's life."""
        if scope["type"] == "http":
            to_all = scope["path"] in TO_ALL
            await self.relay.door.own(self._control, scope, receive, send, to_all=to_all)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    def configure(self, settings: Settings) -> None:
        """Apply settings: those that are live, the others are as before."""
        parts, before = self.parts, self.in_force.settings
        if not same_policy(settings, before):
            parts.policy.configure(policy_of(settings, parts.learner))
        self.relay.configure(_relay_limits(settings))
        for pool in self.relay.pools:
            pool.configure(settings.timeouts.connect_s, settings.keepalive_s)
        parts.prober.interval_s = settings.probe_interval_s
        if settings.log_level != before.log_level:
            set_level(settings.log_level)

    def stop(self) -> None:
        """Take a signal to stop: refuse new work, or if it is not the first, wait for nothing."""
        if self.lifecycle.stop() is Stage.DRAINING:
            timeout_s = self.in_force.settings.drain_timeout_s
            calls = len(self.relay.calls)
            _log.info("stopping: %d requests under way have %g s to end", calls, timeout_s)
        else:
            _log.info("stopping at once")
            self.relay.hurry()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.relay.start()
        self.parts.prober.start()
        self.parts.poller.start()
        self._vocabularies.start()
        self.parts.learning.start()
        self._lag.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._lag.stop()
        await self.parts.learning.aclose()
        await self._vocabularies.aclose()
        await self.parts.poller.aclose()
        await self.parts.prober.aclose()
        await self.relay.aclose()
        await send({"type": "lifespan.shutdown.complete"})


def create_app(
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
    log_lines_dropped: Callable[[], int] = lambda: 0,
) -> CrossoverApp:
    """Make a router; its lifespan starts it. `clock` is monotonic, in seconds."""
    servers = settings.servers
    ledger = Ledger(servers)
    health = {server.name: ServerHealth() for server in servers}
    memory = _memory(settings)
    learner = Learner(servers, layout=settings.layout, calibration=memory.known)
    policy = PolicyInForce(policy_of(settings, learner))
    in_force = InForce(settings)
    lifecycle = Lifecycle()
    steering = Steering(servers, policy, ledger, health, learner=learner)
    security = settings.security
    credentials = by_server(security.access, health)
    upstreams = [
        Upstream(
            server,
            _pool(server, settings, clock),
            health[server.name],
            TokenModel(),
            credentials[server.name],
        )
        for server in servers
    ]
    prober = Prober(
        servers,
        health,
        interval_s=settings.probe_interval_s,
        clock=clock,
        access=security.access,
    )
    poller = LoadPoller(
        servers, health, steering.engine_reported, clock=clock, access=security.access
    )
    tokens = {upstream.spec.name: upstream.tokens for upstream in upstreams}
    vocabularies = VocabularyReader(servers, health, prober.facts, tokens, security.access)
    learning = Learning(steering, learner, memory, servers, tokens, prober.facts, clock)

    def waiting(priority: Priority) -> int:
        return relay.gate.line.depth(priority)

    def aborts() -> dict[str, int]:
        aborter = relay.attempts.aborter
        return {"sent": aborter.sent, "failed": aborter.failed, "dropped": aborter.dropped}

    metrics = Metrics(
        Sources(
            servers=servers,
            ledger=ledger,
            health=health,
            policy=policy,
            steering=SteeringSources(
                learner, ledger, poller.told, lambda: learning.layout_warning is not None
            ),
            admission=AdmissionSources(waiting, lambda: relay.gate.retries_denied),
            parity_warnings=lambda: prober.parity_warnings,
            clock=clock,
            version=__version__,
            aborts=aborts,
            log_lines_dropped=log_lines_dropped,
            operations=OperationsSources(in_force, policy, steering.drained),
        )
    )
    relay = Relay(
        upstreams,
        steering,
        ledger,
        _Observer(metrics),
        _relay_limits(settings),
        door=Door(
            Guard(security.client_keys, security.admin_key),
            Cors(security.cors_origins),
            lifecycle,
        ),
        clock=clock,
    )
    parts = Parts(
        in_force, lifecycle, ledger, health, policy, steering, relay.gate, learner, learning,
        prober, poller, metrics, clock, __version__,
    )  # fmt: skip
    return CrossoverApp(relay, vocabularies, LoopLag(metrics.lag.observer(())), parts)


def _relay_limits(settings: Settings) -> RelayLimits:
    return RelayLimits(
        settings.timeouts,
        settings.body_limit_bytes,
        admission=settings.admission,
        allow_target=settings.allow_target,
    )


def _memory(settings: Settings) -> Memory:
    path = settings.state_file
    file = None if path is None else StateFile(path, logging.getLogger("crossover").warning)
    return Memory(settings.layout, settings.calibration, settings.calibration_source, file)


def _pool(server: ServerSpec, settings: Settings, clock: Callable[[], float]) -> Pool:
    access = settings.security.access.get(server.name, Access())
    return Pool(
        server.url,
        connect_timeout_s=settings.timeouts.connect_s,
        keepalive_s=settings.keepalive_s,
        clock=clock,
        tls=access.tls.context() if server.url.startswith("https:") else None,
    )
