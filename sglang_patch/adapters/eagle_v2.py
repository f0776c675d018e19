"""`EAGLEWorkerV2` (chains, overlapped): hooks that turn a decode step into an OFF step.

Stock `forward_batch_generation` (eagle_worker_v2.py:744-828) stays in charge. The result carries
its own token count (eagle_worker_v2.py:1117), by which the result processor strides
(scheduler_output_processor_mixin.py:426-431): the mode may change between launch and processing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sglang_patch.adapters.direct import is_direct
from sglang_patch.adapters.direct_v2 import direct_step
from sglang_patch.adapters.draft_sync import DraftSync
from sglang_patch.adapters.off_state import OffState, build_off_state
from sglang_patch.adapters.one_node import one_node_verify_input, stale_draft_input
from sglang_patch.adapters.swapping import swapped
from sglang_patch.switch import Switch


def attach(worker: Any, switch: Switch) -> None:
    """Give the worker its switch and what an OFF step needs."""
    drafter = worker.draft_worker
    state = build_off_state(drafter, worker.target_worker.model_runner, drafter.draft_runner)
    worker.spec_switch_off = drafter.spec_switch_off = state
    worker.spec_switch = drafter.spec_switch = switch
    window, worker.spec_switch_sync = switch.config.sync_window, None
    if window is not None:
        worker.spec_switch_sync = DraftSync(drafter, window, switch.telemetry)
        drafter.req_to_token_pool.spec_switch_sync = worker.spec_switch_sync


def forward_batch_generation(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """Prove that this worker is the live one, run the step in its mode, and mark the result with
    it.
    """
    switch: Switch | None = getattr(worker, "spec_switch", None)
    if switch is None:
        return original(worker, batch)
    sync: DraftSync | None = worker.spec_switch_sync
    if sync is not None:
        sync.write_ended()
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        result = original(worker, batch)
        if sync is not None:
            sync.keep_prompts(batch, result.logits_output.hidden_states, result.next_token_ids)
        return result
    switch.seen_in_worker()
    if switch.off:
        result = _off_step(original, worker, batch)
    else:
        if sync is not None:
            sync.resume(worker.draft_worker, batch, worker.spec_switch_off)
        result = original(worker, batch)
    result.spec_switch_mode = switch.mode
    return result


def _off_step(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    off, skips = worker.spec_switch_off, worker.spec_switch.config.skip_draft_extend
    sync: DraftSync | None = worker.spec_switch_sync
    if sync is not None:
        sync.make_room(batch)
    with _one_token_step(worker, off):
        if is_direct(batch) and not skips and not worker.plan_stream:
            worker.spec_switch.telemetry.direct_steps += 1
            return direct_step(worker, batch, off, sync)
        with _extending(worker.draft_worker, skips, sync):
            return original(worker, batch)


def _extending(drafter: Any, skips: bool, sync: DraftSync | None) -> AbstractContextManager[None]:
    """Do with the draft extend of a stock step what is to be done with it."""
    if skips:
        return _leave_draft_stale(drafter)
    if sync is None:
        return nullcontext()

    def keep(batch: Any, batch_result: Any) -> None:
        following = batch_result.next_draft_input
        sync.keep(batch, batch_result.logits_output.hidden_states, following.bonus_tokens)

    return swapped(drafter, _draft_extend_for_decode=keep)


@contextmanager
def _one_token_step(worker: Any, off: OffState) -> Iterator[None]:
    """Lend the step its sizes: bonus tokens, logprobs and the draft extend all stride by these.

    eagle_worker_v2.py: 983 (padding), 574-583 and 588 (extend), 1096 (bonus tokens), 1104
    (logprobs). The stock extend graphs hold num_steps + 1 tokens a request and cannot take one, so
    an OFF step has its own or none.
    """
    drafter = worker.draft_worker
    sizes = {"speculative_num_steps": 0, "speculative_num_draft_tokens": 1}
    with (
        off.on_target(worker.target_worker.model_runner),
        off.on_draft(drafter),
        swapped(worker, **sizes),
        swapped(drafter, **sizes),
    ):
        yield


def draft(original: Callable[..., Any], drafter: Any, batch: Any) -> Any:
    """OFF: draft nothing."""
    switch: Switch | None = getattr(drafter, "spec_switch", None)
    if switch is None or not switch.off or batch.forward_mode.is_idle():
        return original(drafter, batch)
    return one_node_verify_input(
        batch, batch.spec_info.bonus_tokens, drafter.spec_switch_off.constants
    )


def _leave_draft_stale(drafter: Any) -> AbstractContextManager[None]:
    """Diagnostic: replace the draft extend by zeros of its shapes.

    FutureMap stores the tensors of every step in buffers of one shape (overlap_utils.py:197-203).
    """

    def skip(batch: Any, batch_result: Any) -> None:
        stale = stale_draft_input(len(batch.seq_lens), drafter)
        following = batch_result.next_draft_input
        following.topk_p, following.topk_index = stale.topk_p, stale.topk_index
        following.hidden_states = stale.hidden_states

    return swapped(drafter, _draft_extend_for_decode=skip)
