"""Metrics: what a scrape shows of requests, gaps, loads and health."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.core.admission import Priority, Waited
from router.core.breaker import Breaker, Verdict
from router.core.health import ServerHealth
from router.core.learner import Learner
from router.core.ledger import Ledger
from router.core.override import Override, PolicyInForce
from router.core.policy import make_policy
from router.core.types import (
    EngineReport,
    Outcome,
    Reason,
    RequestShape,
    Role,
    ServerSpec,
    SwitchReport,
)
from router.dataplane.admission_metrics import AdmissionSources
from router.dataplane.engine_loads import Told
from router.dataplane.metrics import INTER_TOKEN_BUCKETS_S, Metrics, Sources
from router.dataplane.operations_metrics import OperationsSources
from router.dataplane.record import Refusal, RequestRecord
from router.dataplane.reload import InForce
from router.dataplane.steering_metrics import SteeringSources
from router.settings import Settings

SERVERS = (
    ServerSpec("fast", Role.SPEC, "http://secret-host:1"),
    ServerSpec("wide", Role.BASE, "http://secret-host:2"),
)
FAST = {"server": "fast", "role": "spec"}


class Rig:
    """Metrics over a real ledger and real health."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ledger = Ledger(SERVERS)
        self.health = {server.name: ServerHealth() for server in SERVERS}
        self.warnings: list[str] = []
        self.policy = PolicyInForce(make_policy("threshold", threshold=1))
        self.in_force = InForce(Settings(SERVERS), loaded_at=1700.5)
        self.drained: set[str] = set()
        self.learner = Learner(SERVERS)
        self.depths = {Priority.INTERACTIVE: 0, Priority.BATCH: 7}
        self.told: dict[str, Told] = {}
        self.suspects = False
        self.metrics = Metrics(
            Sources(
                servers=SERVERS,
                ledger=self.ledger,
                health=self.health,
                policy=self.policy,
                steering=SteeringSources(
                    self.learner, self.ledger, self.told.get, lambda: self.suspects
                ),
                admission=AdmissionSources(self.depths.__getitem__, lambda: 5),
                parity_warnings=lambda: self.warnings,
                clock=lambda: self.now,
                version="1.2.3",
                aborts=lambda: {"sent": 3},
                log_lines_dropped=lambda: 4,
                operations=OperationsSources(self.in_force, self.policy, self.drained),
            )
        )

    def text(self) -> str:
        return generate_latest(self.metrics.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None


def record(**fields: object) -> RequestRecord:
    known: dict[str, object] = {
        "streaming": True, "server": "fast", "role": Role.SPEC, "reason": Reason.BELOW_THRESHOLD,
        "outcome": Outcome.OK, "status": 200, "attempts": 1, "prompt_tokens": 10,
        "output_tokens": 5, "ttft_s": 0.15, "duration_s": 3.0, "decision_s": 0.00003,
    }  # fmt: skip
    return RequestRecord("r", "/v1/chat/completions", **{**known, **fields})  # type: ignore[arg-type]


def test_an_ended_request_is_counted_everywhere() -> None:
    rig = Rig()
    rig.metrics.finished(record())
    endpoint = "/v1/chat/completions"
    assert (
        rig.value(
            "router_requests_total", **FAST, endpoint=endpoint, streaming="true", outcome="ok"
        )
        == 1
    )
    assert rig.value("router_responses_total", endpoint=endpoint, code="200") == 1
    assert rig.value("router_decisions_total", **FAST, reason="below_threshold") == 1
    assert rig.value("router_tokens_total", **FAST, token_type="prompt") == 10
    assert rig.value("router_tokens_total", **FAST, token_type="output") == 5
    assert rig.value("router_ttft_seconds_bucket", **FAST, le="0.1") == 0
    assert rig.value("router_ttft_seconds_bucket", **FAST, le="0.2") == 1
    assert rig.value("router_request_duration_seconds_sum", **FAST) == 3.0
    assert rig.value("router_overhead_seconds_count", stage="decision") == 1
    assert rig.value("router_retries_total", **FAST, reason="connect") is None
    assert rig.value("router_queue_wait_seconds_count", priority="interactive") is None


def test_a_retried_request_is_counted_with_its_reason() -> None:
    rig = Rig()
    rig.metrics.finished(record(attempts=2, retry=Refusal.CONNECT))
    assert rig.value("router_retries_total", **FAST, reason="connect") == 1
    assert rig.value("router_retries_total", **FAST, reason="overload") is None
    assert rig.value("router_retries_denied_total") == 5


def test_a_wait_is_counted_by_class_and_end() -> None:
    rig = Rig()
    rig.metrics.finished(record(waited=Waited.SERVED, queue_s=0.3))
    rig.metrics.finished(record(waited=Waited.SHED, queue_s=5.0, priority=Priority.BATCH))
    served = {"priority": "interactive", "result": "served"}
    assert rig.value("router_queue_requests_total", **served) == 1
    assert rig.value("router_queue_requests_total", priority="batch", result="shed") == 1
    assert rig.value("router_queue_wait_seconds_sum", priority="interactive") == 0.3
    assert rig.value("router_queue_wait_seconds_bucket", priority="batch", le="4.0") == 0
    assert rig.value("router_queue_depth", priority="batch") == 7


def test_a_breaker_is_a_number_for_its_state() -> None:
    rig = Rig()
    assert rig.value("router_breaker_state", **FAST) == 0
    breaker = rig.health["fast"].breaker = Breaker(failures_max=1)
    breaker.end(Verdict.FAILURE, 0.0, trial=False)
    assert rig.value("router_breaker_state", **FAST) == 1
    assert rig.value("router_breaker_opened_total", **FAST) == 1
    breaker.tick(5.0)
    assert rig.value("router_breaker_state", **FAST) == 2


def test_a_request_that_reached_no_server_has_none_as_its_server() -> None:
    rig = Rig()
    rig.metrics.finished(
        record(server=None, role=None, reason=None, outcome=Outcome.REJECTED, status=503)
    )
    labels = {"server": "none", "role": "none"}
    assert rig.value("router_request_duration_seconds_count", **labels) == 1
    assert rig.value("router_tokens_total", **labels, token_type="output") is None


def test_a_status_that_http_does_not_know_is_other() -> None:
    rig = Rig()
    for status in (799, 601, 42):
        rig.metrics.finished(record(status=status))
    rig.metrics.finished(record(status=499))
    endpoint = "/v1/chat/completions"
    assert rig.value("router_responses_total", endpoint=endpoint, code="other") == 3
    assert rig.value("router_responses_total", endpoint=endpoint, code="499") == 1


def test_a_time_to_first_token_is_that_of_a_stream() -> None:
    rig = Rig()
    rig.metrics.finished(record(streaming=False))
    assert rig.value("router_ttft_seconds_count", **FAST) is None


def test_gaps_fall_into_the_buckets_of_the_engine() -> None:
    rig = Rig()
    observe = rig.metrics.gap_observer("fast")
    for gap_s in (0.002, 0.0021, 0.5, 100.0):
        observe(gap_s)
    name = "router_inter_token_latency_seconds"
    assert rig.value(f"{name}_bucket", **FAST, le="0.002") == 1
    assert rig.value(f"{name}_bucket", **FAST, le="0.004") == 2
    assert rig.value(f"{name}_bucket", **FAST, le="8.0") == 3
    assert rig.value(f"{name}_bucket", **FAST, le="+Inf") == 4
    assert rig.value(f"{name}_count", **FAST) == 4
    assert rig.value(f"{name}_sum", **FAST) == 0.002 + 0.0021 + 0.5 + 100.0
    assert rig.text().count(f"{name}_bucket") == len(INTER_TOKEN_BUCKETS_S) + 1


def test_loads_are_those_of_the_ledger_at_the_scrape() -> None:
    rig = Rig()
    lease = rig.ledger.acquire("fast", RequestShape(2, 30), rig.now)
    rig.now += 5
    assert rig.value("router_inflight_sequences", **FAST, phase="prefill") == 2
    assert rig.value("router_prefill_tokens", **FAST) == 30
    assert rig.value("router_lease_age_max_seconds") == 5
    lease.first_token(rig.now)
    assert rig.value("router_inflight_sequences", **FAST, phase="decode") == 2
    lease.release(Outcome.OK, rig.now)
    assert rig.value("router_inflight_sequences", **FAST, phase="decode") == 0
    assert rig.value("router_lease_age_max_seconds") == 0


def test_health_is_that_of_the_scrape() -> None:
    rig = Rig()
    assert rig.value("router_server_up", **FAST) == 0
    rig.health["fast"].probe_ok(1.0)
    rig.health["fast"].context_length = 4096
    assert rig.value("router_server_up", **FAST) == 1
    assert rig.value("router_server_context_tokens", **FAST) == 4096
    assert rig.value("router_server_context_tokens", server="wide", role="base") is None


def test_the_mode_and_its_switches_are_shown() -> None:
    rig = Rig()
    assert rig.value("router_policy_mode", role="spec") == 1
    rig.policy.choose(RequestShape(9), rig.ledger.loads(), rig.ledger.loads(), 1.0)
    assert rig.value("router_policy_mode", role="base") == 1
    assert rig.value("router_policy_switches_total") == 1
    assert rig.value("router_build_info", version="1.2.3", policy="threshold") == 1


def test_warnings_aborts_and_lost_lines_are_counted() -> None:
    rig = Rig()
    rig.warnings.append("they differ")
    rig.metrics.lag.observe((), 0.3)
    assert rig.value("router_parity_warnings") == 1
    assert rig.value("router_upstream_aborts_total", result="sent") == 3
    assert rig.value("router_log_lines_dropped_total") == 4
    assert rig.value("router_event_loop_lag_seconds_bucket", le="0.5") == 1


def test_what_an_operator_has_done_is_shown() -> None:
    rig = Rig()
    assert rig.value("router_server_drained", **FAST) == 0
    assert rig.value("router_policy_override_seconds") == 0
    rig.drained.add("fast")
    rig.policy.put(Override(make_policy("spec-only"), until=rig.now + 60))
    assert rig.value("router_server_drained", **FAST) == 1
    assert rig.value("router_policy_override_seconds") == 60
    rig.now += 61
    assert rig.value("router_policy_override_seconds") == 0


def test_the_last_reading_of_the_settings_is_shown() -> None:
    rig = Rig()
    assert rig.value("router_config_last_reload_successful") == 1
    assert rig.value("router_config_last_reload_success_timestamp_seconds") == 1700.5
    rig.in_force.latest = False
    assert rig.value("router_config_last_reload_successful") == 0


def test_no_address_of_a_server_is_shown() -> None:
    rig = Rig()
    rig.metrics.finished(record())
    assert "secret-host" not in rig.text()


def test_what_an_engine_tells_is_shown_with_its_age() -> None:
    rig = Rig()
    switch = SwitchReport("active", "off", threshold=8, off_share=0.25)
    rig.told["fast"] = Told(EngineReport(running=3, queued=1, switch=switch), 0.5, 98.0)
    assert rig.value("router_engine_sequences", **FAST, state="running") == 3
    assert rig.value("router_engine_sequences", **FAST, state="queued") == 1
    assert rig.value("router_engine_kv_usage_ratio", **FAST) == 0.5
    assert rig.value("router_signal_age_seconds", **FAST) == 2
    assert rig.value("router_engine_switch_state", **FAST, state="active") == 1
    assert rig.value("router_engine_switch_state", **FAST, state="armed") == 0
    assert rig.value("router_engine_speculates", **FAST) == 0
    assert rig.value("router_engine_off_share_ratio", **FAST) == 0.25


def test_what_is_not_known_has_no_sample() -> None:
    rig = Rig()
    rig.told["wide"] = Told(EngineReport(), None, 100.0)
    wide = {"server": "wide", "role": "base"}
    assert rig.value("router_signal_age_seconds", **FAST) is None
    assert rig.value("router_engine_sequences", **wide, state="running") is None
    assert rig.value("router_engine_speculates", **wide) is None
    assert rig.value("router_crossover_concurrency") is None
    assert rig.value("router_model_throughput_tokens_per_second", **FAST, bound="low") is None


def test_a_rate_that_has_no_bound_above_is_shown_without() -> None:
    rig = Rig()
    curve = rig.learner.servers["fast"].on
    for second in range(100):  # times that vary this much tell nothing of a load that is far away
        curve.observe(second, 1, 0.001 if second % 2 else 0.1, 1.0)
    rig.ledger.acquire("fast", RequestShape(1000), rig.now)
    for bound, known in (("estimate", True), ("low", True), ("high", False)):
        value = rig.value("router_model_throughput_tokens_per_second", **FAST, bound=bound)
        assert (value is not None) is known


def test_a_pair_that_behaves_as_shared_is_shown() -> None:
    rig = Rig()
    assert rig.value("router_layout_suspect") == 0
    rig.suspects = True
    assert rig.value("router_layout_suspect") == 1


def test_regret_is_shown_by_oracle() -> None:
    rig = Rig()
    assert rig.value("router_regret_ratio", oracle="o1") is None
    rig.learner.regret.add(10.0, 1.0, 150.0, lambda _: 20.0, lambda _: 10.0)
    assert rig.value("router_served_tokens_total") == 150
    assert rig.value("router_oracle_tokens_total", oracle="o1") == 200
    assert rig.value("router_regret_ratio", oracle="o1") == 0.25
