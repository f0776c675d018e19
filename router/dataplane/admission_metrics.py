"""Metrics of the way in: who waits, whose breaker is open, which retries the budget refused."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.admission import Priority
from router.core.breaker import BreakerState
from router.core.health import ServerHealth

_OF_SERVER = ("server", "role")
_BREAKER_STATES: Mapping[BreakerState, float] = {
    BreakerState.CLOSED: 0,
    BreakerState.OPEN: 1,
    BreakerState.HALF_OPEN: 2,
}


@dataclass(frozen=True, slots=True)
class AdmissionSources:
    """Where they are read: how many of a class wait, and the retries that were refused so far."""

    depth: Callable[[Priority], int]
    retries_denied: Callable[[], int]


def admission_families(
    sources: AdmissionSources,
    health: Mapping[str, ServerHealth],
    labels: Mapping[str, tuple[str, ...]],
) -> Iterator[Metric]:
    """Return every family, for a scrape. `labels` are name and role of each server."""
    depth = GaugeMetricFamily(
        "router_queue_depth", "Requests that wait in the router for room", labels=("priority",)
    )
    for priority in Priority:
        depth.add_metric((priority.value,), sources.depth(priority))
    yield depth
    yield CounterMetricFamily(
        "router_retries_denied",
        "Refused requests that the budget did not let go to another server",
        sources.retries_denied(),
    )
    state = GaugeMetricFamily(
        "router_breaker_state", "Breaker: 0 closed, 1 open, 2 half open", labels=_OF_SERVER
    )
    opened = CounterMetricFamily(
        "router_breaker_opened", "How often the breaker has opened", labels=_OF_SERVER
    )
    for name, server in labels.items():
        breaker = health[name].breaker
        state.add_metric(server, _BREAKER_STATES[breaker.state])
        opened.add_metric(server, breaker.opened_total)
    yield state
    yield opened
