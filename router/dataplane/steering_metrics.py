"""What Prometheus sees of the learner, and of what engines say of themselves.

All are read at a scrape from where the truth is. A value that is not known has no sample.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.types import Estimate
from router.dataplane.engine_loads import SWITCH_STATES, Told

_OF_SERVER = ("server", "role")
_BOUNDS = ("estimate", "low", "high")


@dataclass(frozen=True, slots=True)
class SteeringSources:
    """Where they are read. `told` gives a server's latest report, None if there is none."""

    learner: Learner
    ledger: Ledger
    told: Callable[[str], Told | None]
    suspects_layout: Callable[[], bool]


def steering_families(
    sources: SteeringSources, labels: Mapping[str, tuple[str, ...]], now: float
) -> Iterator[Metric]:
    """Return every family, for a scrape. `labels` are name and role of each server."""
    yield from _model_families(sources, labels)
    yield from _regret_families(sources.learner)
    yield from _engine_families(sources, labels, now)


def _model_families(
    sources: SteeringSources, labels: Mapping[str, tuple[str, ...]]
) -> Iterator[Metric]:
    learner = sources.learner
    rate = GaugeMetricFamily(
        "router_model_throughput_tokens_per_second",
        "What the server is believed to give at its present load, at least one sequence",
        labels=(*_OF_SERVER, "bound"),
    )
    for name, server in labels.items():
        sequences = max(1, sources.ledger.load(name).sequences)
        per_token = learner.tpot_s(name, sequences)
        if per_token is not None:
            for bound, value in zip(_BOUNDS, _rates(sequences, per_token), strict=True):
                if value is not None:
                    rate.add_metric((*server, bound), value)
    yield rate
    crossover = GaugeMetricFamily(
        "router_crossover_concurrency",
        "Fewest sequences at which a base server alone is believed faster than a spec server",
    )
    if (load := learner.crossover()) is not None:
        crossover.add_metric((), load)
    yield crossover
    interference = GaugeMetricFamily(
        "router_interference_ratio",
        "How many times longer a token is believed to take while another server works too",
        labels=("bound",),
    )
    slowdown = learner.interference()
    for bound, value in zip(_BOUNDS, (slowdown.slowdown, slowdown.low, slowdown.high), strict=True):
        interference.add_metric((bound,), value)
    yield interference
    suspect = GaugeMetricFamily(
        "router_layout_suspect", "1 if the servers do not behave as the layout in the settings says"
    )
    suspect.add_metric((), float(sources.suspects_layout()))
    yield suspect


def _rates(sequences: int, per_token: Estimate) -> tuple[float, float, float | None]:
    """Tokens a second: the estimate, then the lower and the higher bound, None if there is none.

    Far from every load that was seen the band may reach down to no time at all.
    """
    high = sequences / per_token.low if per_token.low > 0 else None
    return sequences / per_token.value, sequences / per_token.high, high


def _regret_families(learner: Learner) -> Iterator[Metric]:
    served = CounterMetricFamily(
        "router_served_tokens", "Output tokens of all servers, those of streams under way included"
    )
    served.add_metric((), learner.regret.tokens)
    yield served
    oracles = CounterMetricFamily(
        "router_oracle_tokens",
        "Output tokens that an oracle would have made of the same sequences, by the learnt curves",
        labels=("oracle",),
    )
    for oracle, tokens in learner.regret.oracle_tokens().items():
        oracles.add_metric((oracle,), tokens)
    yield oracles
    regret = GaugeMetricFamily(
        "router_regret_ratio",
        "Share of an oracle's tokens that was missed since the start; negative: better than it",
        labels=("oracle",),
    )
    for oracle, share in learner.regret.shares().items():
        if share is not None:
            regret.add_metric((oracle,), share)
    yield regret


def _engine_families(
    sources: SteeringSources, labels: Mapping[str, tuple[str, ...]], now: float
) -> Iterator[Metric]:
    sequences = GaugeMetricFamily(
        "router_engine_sequences",
        "Sequences that the engine says it has, those of other clients too",
        labels=(*_OF_SERVER, "state"),
    )
    usage = GaugeMetricFamily(
        "router_engine_kv_usage_ratio", "Share of the engine's KV cache in use", labels=_OF_SERVER
    )
    age = GaugeMetricFamily(
        "router_signal_age_seconds", "Age of the engine's latest report", labels=_OF_SERVER
    )
    state = GaugeMetricFamily(
        "router_engine_switch_state",
        "1 for the state of the engine's own speculation switch",
        labels=(*_OF_SERVER, "state"),
    )
    speculates = GaugeMetricFamily(
        "router_engine_speculates", "1 if the engine's switch is on now", labels=_OF_SERVER
    )
    off_share = GaugeMetricFamily(
        "router_engine_off_share_ratio",
        "Share of the engine's decode steps that did not speculate, since its start",
        labels=_OF_SERVER,
    )
    for name, server in labels.items():
        told = sources.told(name)
        if told is None:
            continue
        age.add_metric(server, now - told.at)
        for word, count in (("running", told.report.running), ("queued", told.report.queued)):
            if count is not None:
                sequences.add_metric((*server, word), count)
        if told.token_usage is not None:
            usage.add_metric(server, told.token_usage)
        switch = told.report.switch
        if switch is None:
            continue
        for word in SWITCH_STATES:
            state.add_metric((*server, word), float(switch.state == word))
        speculates.add_metric(server, float(switch.mode == "on"))
        if switch.off_share is not None:
            off_share.add_metric(server, switch.off_share)
    yield from (sequences, usage, age, state, speculates, off_share)
