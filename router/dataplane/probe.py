"""Asks the servers how they are, and once what they are.

`/health` of SGLang generates a token, so it tells of the whole engine, but it takes a second or
more, is answered late behind a long prefill, and costs a step. So a server that is up is asked
seldom, and not at all while tokens flow from it, which proves more. Nothing cheaper is as sound:
`/model_info` and `/v1/models` are answered by the HTTP process even if the scheduler hangs.

A server that is not known to be well is asked every second, one question at a time: one that starts
is admitted as it comes up (SGLang answers 503 at once until then), one that died is noticed by two
refused connections.

A server that has come up is asked for its settings, and the differences that matter between all
servers are warned of.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from router.core.health import ServerHealth
from router.core.parity import ServerFacts, compare
from router.core.types import ServerSpec
from router.dataplane.engine_api import EngineApi, NoAnswerError, UnreachableError
from router.dataplane.facts import Told, read_facts
from router.dataplane.watch import Watch
from router.settings import NO_ACCESS, Access

TICK_S = 1.0

_log = logging.getLogger("crossover.probe")


class Prober:
    """Keeps `health` up to date: one task per server, each with one question at a time.

    `interval_s` may be changed at any time.
    """

    def __init__(
        self,
        servers: Sequence[ServerSpec],
        health: Mapping[str, ServerHealth],
        *,
        interval_s: float,
        clock: Callable[[], float],
        tick_s: float = TICK_S,
        access: Mapping[str, Access] = NO_ACCESS,
    ) -> None:
        self._told: dict[str, Told] = {}
        self.parity_warnings: list[str] = []
        self._servers = servers
        self._health = health
        self.interval_s = interval_s
        self._clock = clock
        self._access = access
        self._asked_at: dict[str, float] = {}
        self._facts_wanted: set[str] = set()
        self._watch = Watch("probe", servers, self._look, lambda _: tick_s, _log)

    def facts(self, name: str) -> ServerFacts | None:
        """Return what the server called `name` told of itself, None before it did."""
        told = self._told.get(name)
        return None if told is None else told.facts

    def start(self) -> None:
        """Begin, on the running loop."""
        self._watch.start(EngineApi(access=self._access))

    async def aclose(self) -> None:
        """End, and wait until all is closed."""
        await self._watch.aclose()

    async def _look(self, server: ServerSpec, api: EngineApi) -> None:
        if self._due(server.name):
            await self._probe(server, api)
            self._asked_at[server.name] = self._clock()

    def _due(self, name: str) -> bool:
        health = self._health[name]
        if not health.up or health.transport_errors or health.failed_probes:
            return True
        seen = max(self._asked_at.get(name, float("-inf")), health.last_token_at or float("-inf"))
        return self._clock() - seen >= self.interval_s

    async def _probe(self, server: ServerSpec, api: EngineApi) -> None:
        name, health = server.name, self._health[server.name]
        try:
            await api.get(server, "/health")
        except UnreachableError as error:
            changed = health.transport_error(self._clock(), str(error))
        except NoAnswerError as error:
            changed = health.probe_failed(self._clock(), str(error))
        else:
            changed = health.probe_ok(self._clock())
            if changed:
                self._facts_wanted.add(name)
        if changed:
            if health.up:
                _log.info("server %s is up", name)
            else:
                _log.warning("server %s is %s: %s", name, health.state, health.last_error)
        if health.up and name in self._facts_wanted:
            await self._learn_facts(server, api)

    async def _learn_facts(self, server: ServerSpec, api: EngineApi) -> None:
        told = await read_facts(server, api)
        if told is None:
            return  # asked again with the next probe
        self._facts_wanted.discard(server.name)
        self._told[server.name] = told
        self._health[server.name].context_length = told.facts.context_length
        known = [self._told[each.name] for each in self._servers if each.name in self._told]
        before = set(self.parity_warnings)
        self.parity_warnings = [
            *(remark for each in known for remark in each.remarks),
            *compare([each.facts for each in known]),
        ]
        for warning in self.parity_warnings:
            if warning not in before:
                _log.warning("%s", warning)
