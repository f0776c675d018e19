"""The simulated engine's Prometheus page, in SGLang's names and labels.

What a router, a dashboard or an alert reads of it; not all 108 series.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from loadtest.engine_model import Engine
from loadtest.switching import SwitchingEngine
from sglang_patch.rule import Mode
from sglang_patch.switch import Switch

_TTFT_BUCKETS_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_ITL_BUCKETS_S = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060,
    0.080, 0.100, 0.200, 0.400, 0.600, 0.800, 1.000, 2.000, 4.000, 6.000, 8.000,
)  # fmt: skip
_E2E_BUCKETS_S = (*_TTFT_BUCKETS_S, 600, 1200, 1800, 2400)


class Histogram:
    """Counts by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the exposition lines."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}",{labels}}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self.sum}"


class Metrics:
    """What the tokenizer manager counts: requests, tokens, latencies in model time."""

    def __init__(self) -> None:
        self.requests = 0
        self.aborted = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.ttft_s = Histogram(_TTFT_BUCKETS_S)
        self.itl_s = Histogram(_ITL_BUCKETS_S)
        self.e2e_s = Histogram(_E2E_BUCKETS_S)

    def finished(
        self, prompt_tokens: int, output_tokens: int, cached_tokens: int, e2e_s: float
    ) -> None:
        """Count one ended sequence."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += output_tokens
        self.cached_tokens += cached_tokens
        self.e2e_s.observe(e2e_s)


def accept_length(engine: Engine) -> float | None:
    """Return the mean tokens of a speculative step; None without speculation or steps."""
    totals = engine.totals
    if not engine.params.speculative or not totals.sequence_steps:
        return None
    return totals.decoded_tokens / totals.sequence_steps


def accept_rate(engine: Engine) -> float:
    """Return the accepted share of the draft tokens."""
    acceptance, length = engine.params.decode.acceptance, accept_length(engine)
    if acceptance is None or length is None:
        return 0.0
    return (length - 1) / (acceptance.longest - 1)


def page(engine: Engine, metrics: Metrics, gen_throughput: float, model_name: str) -> str:
    """Return the text of /metrics."""
    ranks = (
        f'engine_type="unified",model_name="{model_name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    )
    front = f'engine_type="unified",model_name="{model_name}"'
    lines: list[str] = []
    for name, value in _gauges(engine, gen_throughput).items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{ranks}}} {float(value)}"]
    counters = {
        "num_retracted_requests_total": (ranks, engine.totals.retractions),
        "num_requests_total": (front, metrics.requests),
        "num_aborted_requests_total": (front, metrics.aborted),
        "prompt_tokens_total": (front, metrics.prompt_tokens),
        "generation_tokens_total": (front, metrics.generation_tokens),
        "cached_tokens_total": (f'cache_source="device",{front}', metrics.cached_tokens),
    }
    for name, (labels, value) in counters.items():
        lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{{{labels}}} {float(value)}"]
    histograms = {
        "time_to_first_token_seconds": metrics.ttft_s,
        "inter_token_latency_seconds": metrics.itl_s,
        "e2e_request_latency_seconds": metrics.e2e_s,
    }
    for name, histogram in histograms.items():
        lines += [f"# TYPE sglang:{name} histogram", *histogram.lines(f"sglang:{name}", front)]
    if isinstance(engine, SwitchingEngine):
        lines += _of_the_plugin(engine.switch, ranks)
    return "\n".join(lines) + "\n"


def _of_the_plugin(switch: Switch, labels: str) -> Iterator[str]:
    for name, value in (
        ("on", switch.mode is Mode.ON),
        ("threshold", switch.config.disable_above),
        ("accept_length_on", switch.telemetry.accept.value),
    ):
        if value is not None:
            yield f"# TYPE sglang:spec_switch_{name} gauge"
            yield f"sglang:spec_switch_{name}{{{labels}}} {float(value)}"
    yield "# TYPE sglang:spec_switch_switches_total counter"
    yield f"sglang:spec_switch_switches_total{{{labels}}} {float(switch.telemetry.switches)}"
    yield "# TYPE sglang:spec_switch_steps_total counter"
    for mode, counters in switch.telemetry.modes.items():
        yield f'sglang:spec_switch_steps_total{{{labels},mode="{mode}"}} {float(counters.steps)}'


def _gauges(engine: Engine, gen_throughput: float) -> Mapping[str, float]:
    used, total = engine.kv_used_tokens, engine.params.kv_tokens
    return {
        "num_running_reqs": engine.num_running,
        "num_queue_reqs": len(engine.waiting),
        "num_retracted_reqs": 0,
        "num_used_tokens": used,
        "kv_used_tokens": used,
        "kv_available_tokens": total - used,
        "max_total_num_tokens": total,
        "token_usage": used / total,
        "full_token_usage": used / total,
        "gen_throughput": gen_throughput,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "context_len": engine.params.context_tokens,
        "spec_accept_length": accept_length(engine) or 0.0,
        "spec_accept_rate": accept_rate(engine),
    }
