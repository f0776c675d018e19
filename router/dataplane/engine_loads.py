"""What engines say of their own load and of their own switch, asked for every few seconds.

The router's own count decides; an engine's corrects it for what the router cannot see: requests of
other clients, and speculation that the engine turns off by itself. `/v1/loads` is SGLang's cheapest
answer to that. Nothing in it is trusted: a value of the wrong type or range counts as not told, and
what was told too long ago is forgotten.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from router.core.health import ServerHealth
from router.core.types import EngineReport, ServerSpec, SwitchReport
from router.dataplane.engine_api import EngineApi, EngineError, NoAnswerError
from router.dataplane.watch import Watch
from router.settings import NO_ACCESS, Access

PATH = "/v1/loads"
POLL_S = 2.0
# A server that has no such path is asked again after this: it may be another one by then.
ABSENT_S = 60.0
AGE_S_MAX = 10.0
ANSWER_TIMEOUT_S = 5.0

SWITCH_STATES = ("loaded", "armed", "active")
SWITCH_MODES = ("on", "off")

_COUNT_MAX = 1_000_000
_RANKS_MAX = 256
_NOT_FOUND = (404, 405)

_log = logging.getLogger("crossover.loads")


@dataclass(frozen=True, slots=True)
class Told:
    """A report, the share of the KV cache in use (None: not told), and when it came."""

    report: EngineReport
    token_usage: float | None
    at: float


class LoadPoller:
    """Asks every server that is up, one question at a time, and passes on what it says."""

    def __init__(
        self,
        servers: Sequence[ServerSpec],
        health: Mapping[str, ServerHealth],
        reported: Callable[[str, float, EngineReport], None],
        *,
        clock: Callable[[], float],
        poll_s: float = POLL_S,
        access: Mapping[str, Access] = NO_ACCESS,
    ) -> None:
        self._health = health
        self._reported = reported
        self._clock = clock
        self._access = access
        self._poll_s = poll_s
        self._told: dict[str, Told] = {}
        self._absent_until: dict[str, float] = {}
        self._watch = Watch("load", servers, self._poll, self._pause_s, _log)

    def told(self, name: str) -> Told | None:
        """Return the latest report of a server; None if there is none, or it is too old."""
        told = self._told.get(name)
        return None if told is None or self._clock() - told.at > AGE_S_MAX else told

    def start(self) -> None:
        """Begin, on the running loop."""
        self._watch.start(EngineApi(ANSWER_TIMEOUT_S, self._access))

    async def aclose(self) -> None:
        """End, and wait until all is closed."""
        await self._watch.aclose()

    def _pause_s(self, server: ServerSpec) -> float:
        # One that comes up is asked soon.
        return self._poll_s if self._health[server.name].up else self._poll_s / 8

    async def _poll(self, server: ServerSpec, api: EngineApi) -> None:
        name = server.name
        if self._health[name].up and self._clock() >= self._absent_until.get(name, 0.0):
            try:
                answer = await api.get_json(server, PATH)
            except NoAnswerError as error:
                if error.status in _NOT_FOUND:
                    self._absent_until[name] = self._clock() + ABSENT_S
            except EngineError:
                pass  # the probes tell who is down
            else:
                self._take(name, read_loads(answer, self._clock()))
                return
        old = self._told.get(name)
        if old is not None and self._clock() - old.at > AGE_S_MAX:
            del self._told[name]
            self._reported(name, self._clock(), EngineReport())

    def _take(self, name: str, told: Told) -> None:
        before = self._told.get(name)
        self._told[name] = told
        self._reported(name, told.at, told.report)
        switch = told.report.switch
        state = None if switch is None else switch.state
        was = None if before is None or before.report.switch is None else before.report.switch.state
        if state != was:
            _log.info("server %s: its speculation switch is %s", name, state or "not there")


def read_loads(answer: Mapping[str, Any], now: float) -> Told:
    """Return what an answer of `/v1/loads` tells, over all data-parallel ranks."""
    loads = answer.get("loads")
    ranks = loads if isinstance(loads, list) and len(loads) <= _RANKS_MAX else []
    if not all(isinstance(rank, dict) for rank in ranks):
        ranks = []
    usages = [_share(rank.get("token_usage")) for rank in ranks]
    known = [usage for usage in usages if usage is not None]
    report = EngineReport(
        running=_sum(ranks, "num_running_reqs"),
        queued=_sum(ranks, "num_waiting_reqs"),
        switch=_switch(ranks),
    )
    return Told(report, max(known) if ranks and len(known) == len(ranks) else None, now)


def _switch(ranks: Sequence[Mapping[str, Any]]) -> SwitchReport | None:
    """Return the first rank's switch, if every rank has one; ranks are configured alike."""
    switches = [_rank_switch(rank.get("spec_switch")) for rank in ranks]
    known = [switch for switch in switches if switch is not None]
    return known[0] if known and len(known) == len(ranks) else None


def _rank_switch(told: object) -> SwitchReport | None:
    if not isinstance(told, dict):
        return None
    state, mode = told.get("state"), told.get("mode")
    if state not in SWITCH_STATES or mode not in SWITCH_MODES:
        return None
    return SwitchReport(
        state=state,
        mode=mode,
        threshold=_count(told.get("threshold")),
        enable_threshold=_count(told.get("enable_threshold")),
        off_share=_share(told.get("off_share")),
    )


def _sum(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    counts = [_count(rank.get(key)) for rank in ranks]
    known = [count for count in counts if count is not None]
    return sum(known) if ranks and len(known) == len(ranks) else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= _COUNT_MAX else None


def _share(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value) if 0 <= value <= 1 else None
