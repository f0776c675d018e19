"""`EAGLEWorker` (trees, and chains without overlap): hooks that turn a decode step into an OFF
step.

Stock `forward_batch_generation` (eagle_worker.py:445-550) stays in charge: draft, verify, draft
extend.
"""

from collections.abc import Callable
from typing import Any

from sglang_patch.adapters.direct import is_direct
from sglang_patch.adapters.direct_v1 import direct_step
from sglang_patch.adapters.off_state import OffState, build_off_state
from sglang_patch.adapters.one_node import one_node_verify_input, stale_draft_input
from sglang_patch.adapters.swapping import swapped
from sglang_patch.switch import Switch


def attach(worker: Any, switch: Switch) -> None:
    """Give the worker its switch and what an OFF step needs."""
    worker.spec_switch_off = build_off_state(
        worker, worker.target_worker.model_runner, worker.draft_model_runner
    )
    worker.spec_switch = switch


def _off(worker: Any) -> OffState | None:
    switch: Switch | None = getattr(worker, "spec_switch", None)
    if switch is None or not switch.off:
        return None
    state: OffState = worker.spec_switch_off
    return state


def forward_batch_generation(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """Prove that this worker is the live one, and mark the result with its mode."""
    switch: Switch | None = getattr(worker, "spec_switch", None)
    if switch is None or batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        return original(worker, batch)
    switch.seen_in_worker()
    if switch.off and not switch.config.skip_draft_extend and is_direct(batch):
        switch.telemetry.direct_steps += 1
        result = direct_step(worker, batch, worker.spec_switch_off)
    else:
        result = original(worker, batch)
    result.spec_switch_mode = switch.mode
    return result


def draft(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """OFF: draft nothing. What `_draft_preprocess_decode` (eagle_worker.py:605-742) does besides is
    done here.
    """
    if _off(worker) is None or batch.forward_mode.is_idle():
        return original(worker, batch)
    batch.maybe_evict_swa()
    for request in batch.reqs:
        request.decode_batch_idx += 1
    bonus_tokens = batch.spec_info.bonus_tokens
    penalizer = batch.sampling_info.penalizer_orchestrator
    if penalizer.is_required:
        import torch

        penalizer.cumulate_output_tokens(bonus_tokens.to(torch.int64))
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.return_hidden_states = False
    return one_node_verify_input(batch, bonus_tokens, worker.spec_switch_off.constants)


def verify(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """OFF: run the stock verify on the one-token backend. It sizes padding by num_steps + 1
    (eagle_worker.py:938).
    """
    off = _off(worker)
    if off is None:
        return original(worker, batch)
    with off.on_target(worker.target_worker.model_runner), swapped(worker, speculative_num_steps=0):
        return original(worker, batch)


def forward_draft_extend_after_decode(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """OFF: the stock extend with one token a request keeps the draft's KV complete, so ON can
    follow at once.
    """
    off = _off(worker)
    if off is None:
        return original(worker, batch)
    if worker.spec_switch.config.skip_draft_extend:
        import torch

        tokens = batch.spec_info.input_ids.to(torch.int32)
        return stale_draft_input(len(tokens), worker, bonus_tokens=tokens)
    if off.extend_graph_runner is None:  # the stock graphs take one token a request as well
        return original(worker, batch)
    with off.on_draft(worker):
        return original(worker, batch)
