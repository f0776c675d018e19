"""Memory of OFF steps, set aside before the KV pool takes what is left: graphs, backends, and the
ring of a deferred draft sync.

SGLang captures graphs after it has sized the pool; an unbudgeted second set would fail there.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang_patch.adapters.draft_sync import PASS_TOKENS
from sglang_patch.adapters.off_state import capture_sizes
from sglang_patch.adapters.server_args import current_config
from sglang_patch.refusals import server_refusals

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""What one captured batch size costs beside its tensors, in both graph sets together."""
BASE_BYTES = 128 << 20
AUXILIARY_LAYERS = 3
"""Layers of the target whose hidden states an EAGLE-3 draft takes, where its file says nothing else
(llama_eagle3.py:153-158); the draft is not loaded yet when the pool is sized.
"""
PASS_WIDTHS = 8
"""Hidden sizes that a pass of the deferred sync holds for each position beside what it reads."""


def profile_available_bytes(
    original: Callable[..., Any], model_runner: Any, pre_model_load_memory: Any
) -> Any:
    """Take the budget off what the target may give to its KV pool
    (model_runner_kv_cache_mixin.py:62-76).
    """
    available = original(model_runner, pre_model_load_memory)
    arguments = model_runner.server_args
    if model_runner.is_draft_worker or arguments.device != "cuda":
        return available
    config = current_config()
    if config is None or server_refusals(arguments):
        return available
    budget = sync_bytes(arguments, model_runner.model_config, config.sync_window or 0)
    if not arguments.disable_cuda_graph:
        budget += budget_bytes(arguments, model_runner.model_config)
    if not budget:
        return available
    logger.info(
        "Speculation switch: %.2f GB set aside for OFF steps before the KV pool is sized.",
        budget / 2**30,
    )
    return available - budget


def budget_bytes(arguments: Any, model_config: Any) -> int:
    """Estimate both backends' buffers, the graphs, and the outputs that they hold."""
    rows = arguments.max_running_requests
    sizes = capture_sizes(list(arguments.cuda_graph_bs or []), rows)
    _, backend = arguments.get_attention_backends()
    slots = rows * model_config.context_len
    slots *= slot_bytes(backend, arguments.page_size, arguments.speculative_eagle_topk)
    logits, hidden = 4 * model_config.vocab_size, 4 * 2 * model_config.hidden_size
    return int(BASE_BYTES + len(sizes) * GRAPH_BYTES + slots + rows * (logits + hidden))


def sync_bytes(arguments: Any, model_config: Any, window: int) -> int:
    """Return what a draft sync deferred by `window` OFF steps keeps, and holds while it writes."""
    if not window:
        return 0
    hidden = model_config.hidden_size * model_config.dtype.itemsize
    kept = window * (arguments.max_running_requests + 1) * (AUXILIARY_LAYERS * hidden + 3 * 8)
    return int(kept + PASS_TOKENS * (AUXILIARY_LAYERS + PASS_WIDTHS) * hidden)


def slot_bytes(backend: str, page_size: int, topk: int) -> float:
    """Return what the target's and the draft extend's backends keep per batch row and position.

    FlashAttention: four int32 page tables each, and two by position for a draft's topk
    (flashattention_backend.py:1340-1560); FlashInfer: int32 indices and a mask each; Triton: int64
    indices and a mask each (triton_backend.py:529-552).
    """
    if backend in ("fa3", "fa4"):
        return 2 * 4 * 4 / page_size + (2 * 4 if topk > 1 else 0)
    return 2 * (4 + 1) if backend == "flashinfer" else 2 * (8 + 1)
