"""Metrics of what an operator has done: servers drained, the policy overridden, settings read."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.override import PolicyInForce
from router.dataplane.reload import InForce


@dataclass(frozen=True, slots=True)
class OperationsSources:
    """Where the gauges are read."""

    in_force: InForce
    policy: PolicyInForce
    drained: Collection[str]


def operations_families(
    sources: OperationsSources, labels: Mapping[str, tuple[str, ...]], now: float
) -> Iterator[Metric]:
    """Return the families; `labels` are those of each server, `now` is monotonic, in seconds."""
    drained = GaugeMetricFamily(
        "router_server_drained", "1 if the server gets nothing new", labels=("server", "role")
    )
    for name, server in labels.items():
        drained.add_metric(server, float(name in sources.drained))
    yield drained
    override = sources.policy.override(now)
    yield GaugeMetricFamily(
        "router_policy_override_seconds",
        "How long the override of the policy will still last, 0 without one",
        0.0 if override is None else override.until - now,
    )
    yield GaugeMetricFamily(
        "router_config_last_reload_successful",
        "1 if the settings that were read last are in force",
        float(sources.in_force.latest),
    )
    yield GaugeMetricFamily(
        "router_config_last_reload_success_timestamp_seconds",
        "When settings were last put in force, in seconds since the epoch",
        sources.in_force.loaded_at,
    )
