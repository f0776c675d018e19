from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, generate_latest

from sglang_patch.adapters.exporter import Exporter
from sglang_patch.config import Config
from sglang_patch.rule import SHARE_STEPS, Mode
from sglang_patch.switch import ARMED_STEPS_MAX, Switch
from sglang_patch.telemetry import SYNCS
from tests.unit.sglang_patch.goodput_rig import Bench, make_rule


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter({"model_name": "m"})
    yield exporter
    for collector in exporter._collectors.values():
        REGISTRY.unregister(collector)


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:spec_switch_{name}", {"model_name": "m", **labels})


def test_counters_grow_by_what_is_new(exporter: Exporter) -> None:
    switch = Switch(Config(8, 6), clock=lambda: 0.0)
    for _ in range(3):
        switch.decide(9, 1000, 16, 0)
        exporter.export(switch)
        exporter.export(switch)
    switch.finished(Mode.OFF, 9, 9, graph_missed=True)
    exporter.export(switch)
    assert shown("steps_total", mode="off") == 3
    assert shown("steps_total", mode="on") == 0
    assert shown("tokens_total", mode="off") == 9
    assert shown("graph_misses_total", mode="off") == 1
    assert shown("switches_total") == 1
    assert shown("on") == 0
    assert shown("threshold") == 8


def test_passes_of_a_deferred_sync_are_counted_by_cause(exporter: Exporter) -> None:
    switch = Switch(Config(8, 6), clock=lambda: 0.0)
    switch.telemetry.deferred_positions += 9
    switch.telemetry.draft_syncs["resume"] += 2
    exporter.export(switch)
    assert shown("deferred_positions_total") == 9
    assert [shown("draft_syncs_total", why=why) for why in SYNCS] == [0, 2, 0]


def test_unknown_figures_are_left_out_rather_than_zero(exporter: Exporter) -> None:
    exporter.export(Switch(Config(8, 6), clock=lambda: 0.0))
    assert shown("accept_length_on") is None
    assert b"sglang:spec_switch_step_seconds{" not in generate_latest()


def test_a_switch_without_effect_is_broken(exporter: Exporter) -> None:
    switch = Switch(Config(8, 6), clock=lambda: 0.0)
    switch.arm()
    seen = []
    for step in range(ARMED_STEPS_MAX + 1):
        switch.decide(1, 1000, 16, step)
        exporter.export(switch)
        seen.append(shown("broken"))
    assert seen == [0] * ARMED_STEPS_MAX + [1]


def test_what_goodput_reckons_with_is_exported(exporter: Exporter) -> None:
    bench = Bench(make_rule())
    exporter.export(bench.switch)
    assert shown("break_even") is None
    bench.run(2 * SHARE_STEPS, running=64)
    exporter.export(bench.switch)
    assert shown("break_even") == pytest.approx(0.0107 / 0.0066, rel=0.01)
    assert shown("estimated_step_seconds", mode="on") == pytest.approx(0.0107, rel=0.01)
    assert shown("accept_length", batch="64") == pytest.approx(2.2, rel=0.01)


def test_state_is_one_hot(exporter: Exporter) -> None:
    switch = Switch(Config(8, 6), clock=lambda: 0.0)
    exporter.export(switch)
    switch.arm()
    exporter.export(switch)
    states = {state: shown("state", state=state) for state in ("loaded", "armed", "active")}
    assert states == {"loaded": 0, "armed": 1, "active": 0}
