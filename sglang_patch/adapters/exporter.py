"""`sglang:spec_switch_*` in `/metrics`. Collectors of the scheduler process; SGLang runs Prometheus
in multiprocess mode.
"""

from collections.abc import Mapping
from typing import Any

from sglang_patch.rule import Mode
from sglang_patch.switch import State, Switch


class Exporter:
    """Copies the telemetry to Prometheus collectors, at every decode step: only what changed is
    written.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        self._labels = dict(labels)
        self._exported: dict[tuple[str, ...], float] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._collectors: dict[str, Any] = {}
        names = list(labels)
        for name, text, more in GAUGES:
            self._collectors[name] = Gauge(
                f"sglang:spec_switch_{name}",
                text,
                [*names, *more],
                multiprocess_mode="mostrecent",
            )
        for name, text, more in COUNTERS:
            self._collectors[name] = Counter(f"sglang:spec_switch_{name}", text, [*names, *more])

    def export(self, switch: Switch) -> None:
        """Bring all collectors up to date."""
        telemetry = switch.telemetry
        for state in State:
            self._set("state", state is switch.state, state=state)
        self._set("broken", switch.broken)
        self._set("on", switch.mode is Mode.ON)
        self._set("threshold", switch.config.disable_above)
        self._set("accept_length_on", telemetry.accept.value)
        self._export_estimates(switch.estimates())
        self._grow("switches", telemetry.switches)
        self._grow("deferred_positions", telemetry.deferred_positions)
        for why, count in telemetry.draft_syncs.items():
            self._grow("draft_syncs", count, why=why)
        for mode, counters in telemetry.modes.items():
            self._grow("steps", counters.steps, mode=mode)
            self._grow("tokens", counters.tokens, mode=mode)
            self._grow("seconds", counters.seconds, mode=mode)
            self._grow("graph_misses", counters.graph_misses, mode=mode)
            for size, average in counters.step_s.items():
                self._set("step_seconds", average.value, mode=mode, batch=str(size))

    def _export_estimates(self, estimates: Mapping[str, Any] | None) -> None:
        if estimates is None:
            return
        self._set("break_even", estimates["break_even"])
        for mode in Mode:
            self._set("estimated_step_seconds", estimates[f"t_{mode}_ms"] / 1e3, mode=mode)
        for size, value in estimates["accept_length_by_batch"].items():
            self._set("accept_length", value, batch=size)

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        key = (name, *labels.values())
        if value is not None and self._exported.get(key) != value:
            self._child(key, labels).set(value)
            self._exported[key] = value

    def _grow(self, name: str, total: float, **labels: str) -> None:
        key = (name, *labels.values())
        before = self._exported.get(key)
        if before != total:
            self._child(key, labels).inc(total - (before or 0.0))
            self._exported[key] = total

    def _child(self, key: tuple[str, ...], labels: Mapping[str, str]) -> Any:
        child = self._children.get(key)
        if child is None:
            texts = {name: str(value) for name, value in labels.items()}
            child = self._collectors[key[0]].labels(**self._labels, **texts)
            self._children[key] = child
        return child


GAUGES = (
    ("state", "1 for the state that the switch is in: loaded, armed or active.", ("state",)),
    ("broken", "1 if steps are decided but the worker never runs its hooks.", ()),
    ("on", "1 if the current decode step speculates.", ()),
    ("threshold", "Running requests above which decoding does not speculate.", ()),
    ("accept_length_on", "Tokens per request and ON step, while the draft is in step.", ()),
    ("step_seconds", "Wall time of a decode step by batch size.", ("mode", "batch")),
    ("break_even", "Accept length from which speculation pays for the current batch.", ()),
    ("estimated_step_seconds", "What a step of the current batch is expected to take.", ("mode",)),
    ("accept_length", "Expected tokens per request and ON step by batch size.", ("batch",)),
)
COUNTERS = (
    ("steps", "Decode steps.", ("mode",)),
    ("tokens", "Tokens that decode steps yielded.", ("mode",)),
    ("seconds", "Wall time of decode steps that follow one another.", ("mode",)),
    ("graph_misses", "Decode steps that ran without a CUDA graph.", ("mode",)),
    ("switches", "Changes of mode.", ()),
    ("deferred_positions", "Positions whose draft KV an OFF step left for later.", ()),
    ("draft_syncs", "Passes that wrote draft KV that was left for later.", ("why",)),
)
