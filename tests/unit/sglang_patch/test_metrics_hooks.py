"""How often the switch's figures reach `/metrics`."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patch.adapters import metrics
from sglang_patch.config import Config
from sglang_patch.switch import Switch


class Recorder:
    """Stands where Prometheus is."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def export(self, switch: Switch) -> None:
        self.steps.append(switch.telemetry.steps)


@pytest.fixture
def switch() -> Switch:
    return Switch(Config(8, 6), clock=lambda: 0.0)


def scheduler_with(switch: Switch, recorder: Recorder) -> Any:
    return SimpleNamespace(
        spec_switch=switch,
        spec_switch_exporter=recorder,
        current_scheduler_metrics_enabled=True,
        is_stats_logging_rank=False,
        spec_num_accept_tokens=1,
        spec_num_forward_ct=1,
    )


def step(scheduler: Any, running: int) -> None:
    scheduler.spec_switch.decide(running, 1000, 16, 0)
    metrics.report_decode_stats(lambda *args: None, scheduler, can_run_cuda_graph=True)


def test_every_eighth_step_is_exported(switch: Switch) -> None:
    recorder = Recorder()
    scheduler = scheduler_with(switch, recorder)
    for _ in range(20):
        step(scheduler, running=1)
    assert recorder.steps == [1, 8, 16]


def test_a_change_of_mode_is_exported_at_once(switch: Switch) -> None:
    recorder = Recorder()
    scheduler = scheduler_with(switch, recorder)
    for running in (1, 1, 9, 9):
        step(scheduler, running)
    assert recorder.steps == [1, 3]
