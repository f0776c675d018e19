"""What Prometheus sees. Labels come from closed sets only: nothing that a client sends becomes one.

Counting changes an entry of a dict or a list, so that it costs next to nothing per request and per
chunk; the text is made at the scrape, when gauges are read from where the truth is: the ledger, the
health of the servers, the policy. The buckets are SGLang's, so that panels of both overlay.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.core.admission import Priority, Waited
from router.core.health import ServerHealth
from router.core.ledger import Ledger
from router.core.types import Phase, Policy, Role, ServerSpec
from router.dataplane.admission_metrics import AdmissionSources, admission_families
from router.dataplane.operations_metrics import OperationsSources, operations_families
from router.dataplane.record import RequestRecord
from router.dataplane.steering_metrics import SteeringSources, steering_families
from router.settings import NO_SERVER

TTFT_BUCKETS_S = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080,
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
DURATION_BUCKETS_S = (*TTFT_BUCKETS_S, 600, 1200, 1800, 2400)
OVERHEAD_BUCKETS_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1,
)  # fmt: skip
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

_OF_SERVER = ("server", "role")
_CODES = frozenset({*(status.value for status in HTTPStatus), 499})
_OF_NO_SERVER = (NO_SERVER, NO_SERVER)


class Counts:
    """A counter with labels."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(self, labels: tuple[str, ...], by: float = 1) -> None:
        """Count. The label values are in the order of the names."""
        self._counts[labels] += by

    def collect(self) -> Metric:
        """Return the family for a scrape."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        return family


class Spread:
    """A histogram with labels. Each combination has a list of counts, one per bucket, and a sum."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = tuple(bounds)
        self._cells: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}

    def observer(self, labels: tuple[str, ...]) -> Callable[[float], None]:
        """Return the function that takes one value: a bisection and two adds, cheap per chunk."""
        counts, total = self._cell(labels)

        def observe(
            value: float,
            counts: list[int] = counts,
            total: list[float] = total,
            bounds: tuple[float, ...] = self._bounds,
        ) -> None:
            counts[bisect_left(bounds, value)] += 1
            total[0] += value

        return observe

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Take one value."""
        counts, total = self._cell(labels)
        counts[bisect_left(self._bounds, value)] += 1
        total[0] += value

    def totals(self, labels: tuple[str, ...]) -> tuple[int, float]:
        """Return how many values were taken, and their sum."""
        counts, total = self._cells.get(labels, ([], [0.0]))
        return sum(counts), total[0]

    def collect(self) -> Metric:
        """Return the family for a scrape."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, (counts, total) in self._cells.items():
            buckets, below = [], 0
            for bound, count in zip((*map(_bound, self._bounds), "+Inf"), counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric(values, buckets, total[0])
        return family

    def _cell(self, labels: tuple[str, ...]) -> tuple[list[int], list[float]]:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = ([0] * (len(self._bounds) + 1), [0.0])
        return cell


def _bound(value: float) -> str:
    return repr(float(value))


@dataclass(frozen=True, slots=True)
class Sources:
    """Where gauges are read at a scrape."""

    servers: Sequence[ServerSpec]
    ledger: Ledger
    health: Mapping[str, ServerHealth]
    policy: Policy
    steering: SteeringSources
    admission: AdmissionSources
    parity_warnings: Callable[[], Sequence[str]]
    clock: Callable[[], float]
    version: str
    aborts: Callable[[], Mapping[str, int]]
    log_lines_dropped: Callable[[], int]
    operations: OperationsSources


class Metrics(Collector):
    """All metrics of one router, on a registry of its own."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._labels = {server.name: (server.name, server.role.value) for server in sources.servers}
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counts(
            "router_requests",
            "Requests that ended",
            (*_OF_SERVER, "endpoint", "streaming", "outcome"),
        )
        self.responses = Counts(
            "router_responses", "Responses by the status the client was sent", ("endpoint", "code")
        )
        self.decisions = Counts(
            "router_decisions", "Servers chosen, and why", (*_OF_SERVER, "reason")
        )
        self.retries = Counts(
            "router_retries",
            "Requests that were sent to a second server, by the one that answered, and why",
            (*_OF_SERVER, "reason"),
        )
        self.queue_requests = Counts(
            "router_queue_requests",
            "Requests that found no room, by how their wait ended",
            ("priority", "result"),
        )
        self.queue_wait = Spread(
            "router_queue_wait_seconds",
            "Time that requests waited for room, however that ended",
            ("priority",),
            TTFT_BUCKETS_S,
        )
        self.tokens = Counts(
            "router_tokens", "Tokens of the requests that ended", (*_OF_SERVER, "token_type")
        )
        self.ttft = Spread(
            "router_ttft_seconds", "Time to first token, streams only", _OF_SERVER, TTFT_BUCKETS_S
        )
        self.gaps = Spread(
            "router_inter_token_latency_seconds",
            "Time between two chunks of a stream; a chunk has the tokens of one engine step",
            _OF_SERVER,
            INTER_TOKEN_BUCKETS_S,
        )
        self.durations = Spread(
            "router_request_duration_seconds",
            "Time from a request's arrival to its end",
            _OF_SERVER,
            DURATION_BUCKETS_S,
        )
        self.overhead = Spread(
            "router_overhead_seconds", "Time that the router adds", ("stage",), OVERHEAD_BUCKETS_S
        )
        self.lag = Spread(
            "router_event_loop_lag_seconds",
            "How much later than asked the event loop calls back",
            (),
            LAG_BUCKETS_S,
        )
        for priority in Priority:
            for waited in Waited:  # a rate needs the zero before the first one
                self.queue_requests.add((priority.value, waited.value), 0)
        self._events = (
            self.requests, self.responses, self.decisions, self.retries, self.tokens,
            self.ttft, self.gaps, self.durations, self.overhead, self.lag, self.queue_requests,
            self.queue_wait,
        )  # fmt: skip
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def gap_observer(self, server: str) -> Callable[[float], None]:
        """Return the function that takes one gap between two chunks of `server`, in seconds."""
        return self.gaps.observer(self._labels[server])

    def first_tokens(self, server: str) -> tuple[int, float]:
        """Return how many streams of `server` had a first token, and the sum of their TTFT in s."""
        return self.ttft.totals(self._labels[server])

    def finished(self, record: RequestRecord) -> None:
        """Count an ended request."""
        server = _OF_NO_SERVER if record.server is None else self._labels[record.server]
        streaming = "true" if record.streaming else "false"
        self.requests.add((*server, record.endpoint, streaming, record.outcome.value))
        code = str(record.status) if record.status in _CODES else "other"
        self.responses.add((record.endpoint, code))
        self.durations.observe(server, record.duration_s)
        if record.waited is not None:
            self.queue_requests.add((record.priority.value, record.waited.value))
            self.queue_wait.observe((record.priority.value,), record.queue_s or 0.0)
        if record.server is None:
            return
        if record.reason is not None:
            self.decisions.add((*server, record.reason.value))
        self.overhead.observe(("decision",), record.decision_s)
        if record.attempts > 1 and record.retry is not None:
            self.retries.add((*server, record.retry.value))
        self.tokens.add((*server, "prompt"), record.prompt_tokens)
        self.tokens.add((*server, "output"), record.output_tokens)
        if record.streaming and record.ttft_s is not None:
            self.ttft.observe(server, record.ttft_s)

    def collect(self) -> Iterable[Metric]:
        """Return every family, for a scrape."""
        yield from (event.collect() for event in self._events)
        yield from self._load_gauges()
        yield from self._server_gauges()
        now = self._sources.clock()
        yield from steering_families(self._sources.steering, self._labels, now)
        yield from operations_families(self._sources.operations, self._labels, now)
        sources = self._sources
        yield from admission_families(sources.admission, sources.health, self._labels)
        yield from self._own_gauges()

    def _load_gauges(self) -> Iterator[Metric]:
        sequences = GaugeMetricFamily(
            "router_inflight_sequences",
            "Sequences in flight, by the router's own count",
            labels=(*_OF_SERVER, "phase"),
        )
        prefill_tokens = GaugeMetricFamily(
            "router_prefill_tokens", "Prompt tokens that wait for a first token", labels=_OF_SERVER
        )
        for load in self._sources.ledger.loads():
            server = self._labels[load.name]
            sequences.add_metric((*server, Phase.PREFILL.value), load.prefill_sequences)
            sequences.add_metric((*server, Phase.DECODE.value), load.decode_sequences)
            prefill_tokens.add_metric(server, load.prefill_tokens)
        age = self._sources.ledger.oldest_age_s(self._sources.clock())
        yield sequences
        yield prefill_tokens
        yield GaugeMetricFamily(
            "router_lease_age_max_seconds", "Age of the oldest request in flight", age or 0
        )

    def _server_gauges(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "router_server_up", "1 if the server may be sent work", labels=_OF_SERVER
        )
        context = GaugeMetricFamily(
            "router_server_context_tokens", "Context length of the server", labels=_OF_SERVER
        )
        for name, health in self._sources.health.items():
            up.add_metric(self._labels[name], float(health.up))
            if health.context_length is not None:
                context.add_metric(self._labels[name], health.context_length)
        yield up
        yield context

    def _own_gauges(self) -> Iterator[Metric]:
        policy = self._sources.policy
        mode = GaugeMetricFamily(
            "router_policy_mode", "1 at the role that all requests go to", labels=("role",)
        )
        for role in Role:
            mode.add_metric((role.value,), float(policy.mode is role))
        warnings = len(self._sources.parity_warnings())
        build = GaugeMetricFamily(
            "router_build_info", "Always 1; what runs", labels=("version", "policy")
        )
        build.add_metric((self._sources.version, policy.name), 1)
        aborts = CounterMetricFamily(
            "router_upstream_aborts", "Aborts of requests that nobody waits for", labels=("result",)
        )
        for result, count in self._sources.aborts().items():
            aborts.add_metric((result,), count)
        yield aborts
        yield CounterMetricFamily(
            "router_log_lines_dropped",
            "Log lines that nobody read fast enough",
            self._sources.log_lines_dropped(),
        )
        yield CounterMetricFamily(
            "router_policy_switches", "Changes of the policy's mode", policy.switches
        )
        yield mode
        yield GaugeMetricFamily(
            "router_parity_warnings", "Differences between the servers", warnings
        )
        yield build
