"""Results and metrics: OFF steps stay out of SGLang's accept lengths, and the switch reports
itself.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from sglang_patch.adapters.exporter import Exporter
from sglang_patch.rule import Mode
from sglang_patch.switch import Switch

logger = logging.getLogger(__name__)

EXPORT_STEPS = 8
"""Decode steps between two updates of `/metrics`: each writes to files that Prometheus shares."""


def _switch(scheduler: Any) -> Switch | None:
    switch: Switch | None = getattr(scheduler, "spec_switch", None)
    return switch


def process_batch_result_decode(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any
) -> Any:
    """Hold the result while it is counted: under overlap the current mode is a later step's."""
    if _switch(scheduler) is None:
        return original(scheduler, batch, result)
    scheduler.spec_switch_counting = (batch, result)
    try:
        return original(scheduler, batch, result)
    finally:
        scheduler.spec_switch_counting = None


def update_spec_metrics(
    original: Callable[..., Any], scheduler: Any, bs: int, num_correct_drafts: int
) -> Any:
    """Leave OFF steps out: they accept nothing because they draft nothing
    (scheduler_metrics_mixin.py:332-337).
    """
    switch = _switch(scheduler)
    batch, result = getattr(scheduler, "spec_switch_counting", None) or (None, None)
    mode: Mode | None = getattr(result, "spec_switch_mode", None)
    if switch is None or result is None or mode is None:
        return original(scheduler, bs, num_correct_drafts)
    graphs = not scheduler.server_args.disable_cuda_graph
    missed = graphs and not result.can_run_cuda_graph
    requests, tokens = _yielded(batch, result)
    switch.finished(mode, requests, tokens, graph_missed=missed)
    if mode is Mode.OFF:
        scheduler.num_generated_tokens += num_correct_drafts
        return None
    return original(scheduler, bs, num_correct_drafts)


def _yielded(batch: Any, result: Any) -> tuple[int, int]:
    """Return the requests of a step and their tokens. Under overlap a step may carry requests that
    ended while it was in flight; their tokens are thrown away.
    """
    correct = result.num_correct_drafts_per_req_cpu
    if batch.is_spec_v2:
        pairs = zip(batch.reqs, correct, strict=True)
        correct = [n for request, n in pairs if not (request.finished() or request.is_retracted)]
    return len(correct), len(correct) + sum(correct)


def report_decode_stats(
    original: Callable[..., Any],
    scheduler: Any,
    can_run_cuda_graph: bool,
    running_batch: Any = None,
    num_correct_drafts: int = 0,
) -> Any:
    """Let an interval of OFF steps only repeat the last accept length: stock divides by its number
    of counted steps (scheduler_metrics_mixin.py:681), which is 0 then. Totals stay as they were.
    """
    switch = _switch(scheduler)
    if switch is None:
        return original(scheduler, can_run_cuda_graph, running_batch, num_correct_drafts)
    _export(scheduler, switch)
    counted = (scheduler.spec_num_accept_tokens, scheduler.spec_num_forward_ct)
    borrowed = (0, 0)
    if not counted[1]:
        borrowed = getattr(scheduler, "spec_switch_last_counted", (1, 1))
        scheduler.spec_num_accept_tokens, scheduler.spec_num_forward_ct = borrowed
    original(scheduler, can_run_cuda_graph, running_batch, num_correct_drafts)
    if scheduler.spec_num_forward_ct:  # not a reporting step: nothing was used up
        scheduler.spec_num_accept_tokens -= borrowed[0]
        scheduler.spec_num_forward_ct -= borrowed[1]
        return None
    scheduler.spec_total_num_accept_tokens -= borrowed[0]
    scheduler.spec_total_num_forward_ct -= borrowed[1]
    if counted[1]:
        scheduler.spec_switch_last_counted = counted
    if scheduler.is_stats_logging_rank:
        _log(switch)
    return None


def _log(switch: Switch) -> None:
    figures = switch.telemetry.summary(0)
    logger.info(
        "Speculation switch: state: %s, mode: %s, off share: %.3f, switches: %d, step ms: %s",
        switch.state,
        switch.mode,
        figures["off_share"],
        figures["switches_total"],
        figures["step_ms"],
    )


def _export(scheduler: Any, switch: Switch) -> None:
    """Bring `/metrics` up to date, on the rank that reports: every few steps, and as soon as the
    mode or the state changes.
    """
    if not scheduler.current_scheduler_metrics_enabled:
        return
    due = (switch.mode, switch.state, switch.telemetry.steps // EXPORT_STEPS)
    if due == getattr(scheduler, "spec_switch_exported", None):
        return
    scheduler.spec_switch_exported = due
    exporter: Exporter | None = getattr(scheduler, "spec_switch_exporter", None)
    if exporter is None:
        exporter = scheduler.spec_switch_exporter = Exporter(scheduler.metrics_collector.labels)
    exporter.export(switch)


def get_loads(original: Callable[..., Any], scheduler: Any, req: Any = None) -> Any:
    """Add `spec_switch` to what `/v1/loads` shows. Output streaming asks for the core section with
    every message (scheduler_output_processor_mixin.py:1053) and drops the answer, so that is left
    alone.
    """
    from sglang_patch.adapters.loads import SwitchLoads

    loads = original(scheduler, req)
    switch = _switch(scheduler)
    asked = {"all"} if req is None else set(req.include)
    if switch is None or not asked & {"all", "spec"}:
        return loads
    fields = {field.name: getattr(loads, field.name) for field in dataclasses.fields(loads)}
    return SwitchLoads(**fields, spec_switch=switch.snapshot())


def get_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Add `spec_switch` to what `/server_info` shows under `internal_states`."""
    output = original(scheduler, recv_req)
    switch = _switch(scheduler)
    if switch is not None:
        output.internal_state["spec_switch"] = switch.snapshot()
    return output
