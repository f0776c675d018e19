"""The scheduler: arms the switch, decides once per decode step, reserves what that step needs."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang_patch.adapters import eagle_v1, eagle_v2
from sglang_patch.adapters.draft_kv import why_not
from sglang_patch.adapters.draft_sync import store_last_tokens
from sglang_patch.adapters.measuring import read_given
from sglang_patch.adapters.off_state import one_token
from sglang_patch.adapters.server_args import current_config
from sglang_patch.adapters.swapping import swapped
from sglang_patch.config import DEFERRED, DRAFT_SYNC, SKIP_DRAFT_EXTEND, Config, ConfigError
from sglang_patch.plugin import unapplied
from sglang_patch.refusals import (
    Refusal,
    hook_refusal,
    hybrid_refusal,
    refuse,
    server_refusals,
    stop,
    sync_refusal,
    worker_refusal,
)
from sglang_patch.rule import HEADROOM
from sglang_patch.switch import Switch

logger = logging.getLogger(__name__)

ATTACH: dict[str, Callable[[Any, Switch], None]] = {
    "EAGLEWorker": eagle_v1.attach,
    "EAGLEWorkerV2": eagle_v2.attach,
}


def maybe_init_draft_worker(original: Callable[..., Any], scheduler: Any) -> Any:
    """Arm the switch once the worker that will serve exists (scheduler.py:675-715)."""
    config = current_config()
    if config is None:
        return original(scheduler)
    refusals = server_refusals(scheduler.server_args)
    refusals = refusals or hybrid_refusal(scheduler.tp_worker.model_runner)
    if refusals:
        scheduler.spec_switch = _inert(config, refusals, scheduler.tp_rank)
        return original(scheduler)
    original(scheduler)
    worker = scheduler.draft_worker
    kind = type(worker).__name__
    if refusals := worker_refusal(kind, known=ATTACH) or hook_refusal(unapplied()):
        scheduler.spec_switch = _inert(config, refusals, scheduler.tp_rank)
        return None
    if config.sync_window is not None and (refusals := _sync_refusal(kind, worker)):
        asked = f"{DRAFT_SYNC.flag} {DEFERRED}"
        scheduler.spec_switch = _inert(config, refusals, scheduler.tp_rank, asked)
        return None
    switch = Switch(
        config,
        time.perf_counter,
        rank=scheduler.tp_rank,
        trace=_trace(config),
        share=partial(_share, scheduler),
    )
    try:
        read_given(switch)
    except ConfigError as error:
        stop(str(error))
    ATTACH[kind](worker, switch)
    switch.arm()
    scheduler.spec_switch = switch
    _announce(config)
    return None


def _share(scheduler: Any, learnt: Any) -> Any:
    """Return the first rank's value on every rank. They wait for each other at every turn of the
    loop anyway, for their requests (scheduler.py:1752), by the same means: no GPU takes part.
    """
    if scheduler.tp_size == 1:
        return learnt
    from sglang.srt.utils import broadcast_pyobj

    group = scheduler.tp_group
    return broadcast_pyobj([learnt], group.rank, scheduler.tp_cpu_group, src=group.ranks[0])[0]


def _announce(config: Config) -> None:
    if config.schedule is not None:
        logger.warning("Speculation switch: modes are forced (%s).", config.schedule)
    elif config.measures:
        logger.info("Speculation switch: armed. ON where measured step times say so.")
    else:
        logger.info(
            "Speculation switch: armed. OFF above %s running requests, ON again at or below %s, "
            "after %d decode steps at least.",
            config.disable_above,
            config.enable_at,
            config.dwell_steps,
        )
    if config.skip_draft_extend:
        logger.warning(
            "Speculation switch: OFF STEPS LEAVE THE DRAFT STALE (%s). Acceptance collapses after "
            "each of them: for timing only, never for serving.",
            SKIP_DRAFT_EXTEND.variable,
        )


def _sync_refusal(kind: str, worker: Any) -> tuple[Refusal, ...]:
    known = ATTACH[kind] is eagle_v2.attach
    return sync_refusal(kind, why_not(worker.draft_worker.draft_runner.model) if known else None)


def _inert(
    config: Config, refusals: tuple[Refusal, ...], rank: int, asked_by: str | None = None
) -> Switch:
    """End the process, or go on without the switch where that is allowed."""
    asked_by = asked_by or config.asked_by
    reason = refuse(refusals, asked_by=asked_by, optional=config.optional)
    return Switch(config, time.perf_counter, rank=rank, reason=reason)


def _trace(config: Config) -> Callable[[str], object] | None:
    """Open the trace. One write call a line keeps lines of several ranks apart (O_APPEND)."""
    if config.trace is None:
        return None
    stream = Path(config.trace).open("a", buffering=1)  # noqa: SIM115  open as long as the process
    return stream.write


def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """Decide the step: after finished requests left (scheduler.py:2902), before the memory check
    (2913).

    The filter runs here first and finds nothing to do the second time (schedule_batch.py:2436). It
    would have told the stock code that the batch has room again (2977), so that is done here, too.
    """
    switch: Switch | None = getattr(scheduler, "spec_switch", None)
    if switch is None or switch.reason is not None:
        return original(scheduler, batch)
    before = batch.batch_size()
    batch.filter_batch(v1_spec_info_filtered=True)
    if batch.is_empty():
        return original(scheduler, batch)
    if batch.batch_size() < before:
        batch.batch_is_full = False
    batch.spec_switch = None  # ask for what an ON step reserves
    free_tokens, on_tokens = _kv_tokens(batch)
    context_tokens = int(batch.seq_lens_cpu.sum())
    rows = batch.batch_size()
    switch.decide(rows, free_tokens, on_tokens, scheduler.forward_ct, context_tokens)
    batch.spec_switch = switch
    if not (switch.off and batch.is_spec_v2):
        return original(scheduler, batch)
    # v2 reserves twice get_alloc_len_per_decode() (eagle_info_v2.py:119-136), which reads the
    # server arguments: one slot for this step and one for the step in flight.
    with one_token(scheduler.server_args):
        return original(scheduler, batch)


def _kv_tokens(batch: Any) -> tuple[int, int]:
    """Return the free KV slots and what an ON step reserves.

    Counting what v2 reserves is a loop over all requests: where the most that it can be fits, that
    will do, and so do slots that are free without evicting anything.
    """
    free_tokens = batch.token_to_kv_pool_allocator.available_size()
    if batch.is_spec_v2 and (most := _v2_tokens_max(batch)) * HEADROOM <= free_tokens:
        return free_tokens, most
    on_tokens = batch.new_tokens_required_next_decode()
    return free_tokens + batch.tree_cache.evictable_size(), on_tokens


def _v2_tokens_max(batch: Any) -> int:
    """Return the most that a v2 step can reserve: twice its tokens, and a page begun for each
    request (schedule_batch.py:2145-2156).
    """
    from sglang.srt.managers.utils import get_alloc_len_per_decode

    page_size = batch.token_to_kv_pool_allocator.page_size
    return len(batch.reqs) * (2 * int(get_alloc_len_per_decode()) + int(page_size) - 1)


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, pp_proxy_tensors: Any = None
) -> Any:
    """v2, OFF: keep the overlap. Stock waits for each verification before it prepares the next
    step, to learn the new lengths (schedule_batch.py:2415, eagle_info_v2.py:97). An OFF step adds
    one token to each request, so they are known before it runs.

    They are computed here, on the scheduler's own stream: `seq_lens.cpu()` (eagle_info_v2.py:155)
    then need not wait for the forward stream, whose tensor scheduler.py:3066 would leave.
    """
    switch: Switch | None = getattr(scheduler, "spec_switch", None)
    decodes = batch.is_spec_v2 and batch.forward_mode.is_decode()
    if switch is None or not switch.off or not decodes:
        return original(scheduler, batch, pp_proxy_tensors)
    seq_lens = batch.seq_lens + 1
    futures = scheduler.future_map
    lent: dict[str, object] = {"resolve_future": partial(_resolve_last_tokens, futures)}
    if switch.config.sync_window is not None:
        lent["store_to_map"] = partial(store_last_tokens, futures)
    with swapped(futures, **lent):
        result = original(scheduler, batch, pp_proxy_tensors)
    batch.seq_lens = seq_lens
    batch.spec_info.verify_done = None
    return result


def _resolve_last_tokens(futures: Any, model_worker_batch: Any) -> None:
    """Fetch what an OFF step reads of the last step's outcome: no candidates, no hidden states, nor
    lengths (overlap_utils.py:133-158).
    """
    import torch

    draft_input = model_worker_batch.spec_info
    indices = draft_input.future_indices.indices
    # Made on the scheduler's stream: keep its memory until the forward stream has read it.
    indices.record_stream(torch.get_device_module(futures.device).current_stream())
    draft_input.bonus_tokens = futures.bonus_tokens_buf[indices]


def new_tokens_required_next_decode(
    original: Callable[..., Any], batch: Any, selected_indices: list[int] | None = None
) -> Any:
    """v1, OFF: exactly the new pages. verify() allocates as for a prefill and raises if they are
    not there (common.py:356-395), instead of retracting, so neither more nor less will do.

    v2, OFF: the most that it can be, where that is free: whoever asks compares it with that.
    """
    switch: Switch | None = getattr(batch, "spec_switch", None)
    if switch is None or not switch.off:
        return original(batch, selected_indices)
    allocator = batch.token_to_kv_pool_allocator
    if batch.is_spec_v2:
        most = _v2_tokens_max(batch)
        fits = selected_indices is None and most <= allocator.available_size()
        return most if fits else original(batch, selected_indices)
    page_size = allocator.page_size
    requests = batch.reqs if selected_indices is None else [batch.reqs[i] for i in selected_indices]
    return page_size * sum(request.kv_committed_len % page_size == 0 for request in requests)
