"""`sglang:spec_switch_*` in `/metrics`. Collectors of the scheduler process; SGLang runs Prometheus
in multiprocess mode.
"""

from collections.abc import Mapping
from typing import Any

from sglang_patch.rule import Mode
from sglang_patch.switch import State, Switch


class Exporter:
    """Copies the telemetry to Prometheus collectors. Counters grow by what is new since the last
    copy.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        self._labels = dict(labels)
        self._exported: dict[tuple[Any, ...], float] = {}
        names = list(labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(
                f"sglang:spec_switch_{name}", text, [*names, *more], multiprocess_mode="mostrecent"
            )

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(f"sglang:spec_switch_{name}", text, [*names, *more])

        self._state = gauge(
            "state", "1 for the state that the switch is in: loaded, armed or active.", "state"
        )
        self._broken = gauge(
            "broken", "1 if steps are decided but the worker never runs its hooks."
        )
        self._on = gauge("on", "1 if the current decode step speculates.")
        self._threshold = gauge(
            "threshold", "Running requests above which decoding does not speculate."
        )
        self._accept = gauge(
            "accept_length_on", "Tokens per request and ON step, while the draft is in step."
        )
        self._step = gauge(
            "step_seconds",
            "Wall time of a decode step by batch size (powers of two).",
            "mode",
            "batch",
        )
        self._counters = {
            "steps": counter("steps", "Decode steps.", "mode"),
            "tokens": counter("tokens", "Tokens that decode steps yielded.", "mode"),
            "seconds": counter(
                "seconds", "Wall time of decode steps that follow one another.", "mode"
            ),
            "graph_misses": counter(
                "graph_misses", "Decode steps that ran without a CUDA graph.", "mode"
            ),
        }
        self._switches = counter("switches", "Changes of mode.")

    def export(self, switch: Switch) -> None:
        """Bring all collectors up to date."""
        telemetry = switch.telemetry
        for state in State:
            self._state.labels(**self._labels, state=str(state)).set(state is switch.state)
        self._broken.labels(**self._labels).set(switch.broken)
        self._on.labels(**self._labels).set(switch.mode is Mode.ON)
        if switch.config.disable_above is not None:
            self._threshold.labels(**self._labels).set(switch.config.disable_above)
        if telemetry.accept.value is not None:
            self._accept.labels(**self._labels).set(telemetry.accept.value)
        self._grow(self._switches, telemetry.switches)
        for mode, counters in telemetry.modes.items():
            for name, counter in self._counters.items():
                self._grow(counter, getattr(counters, name), mode=str(mode))
            for size, average in counters.step_s.items():
                if average.value is not None:
                    labels = {**self._labels, "mode": str(mode), "batch": str(size)}
                    self._step.labels(**labels).set(average.value)

    def _grow(self, counter: Any, total: float, **more: str) -> None:
        key = (id(counter), *more.values())
        grown = total - self._exported.get(key, 0.0)
        if grown > 0 or key not in self._exported:
            counter.labels(**self._labels, **more).inc(grown)
            self._exported[key] = total
