"""Memory of the OFF graphs and backends, set aside before the KV pool takes what is left.

SGLang captures graphs after it has sized the pool; an unbudgeted second set would fail there.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_patch.adapters.off_state import capture_sizes
from sglang_patch.config import ConfigError, read_config
from sglang_patch.refusals import server_refusals

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""What one captured batch size costs beside its tensors: kernels' launch records, in both graph
sets.
"""
BASE_BYTES = 128 << 20
BYTES_PER_SLOT = {"fa3": 12, "fa4": 12, "flashinfer": 10, "triton": 18}
"""Per batch row and context position, both backends: page tables of fa3 (three int32), kv_indices
and mask of flashinfer (int32, uint8) and Triton (int64, uint8).
"""


def profile_available_bytes(
    original: Callable[..., Any], model_runner: Any, pre_model_load_memory: Any
) -> Any:
    """Take the budget off what the target may give to its KV pool
    (model_runner_kv_cache_mixin.py:62-76).
    """
    available = original(model_runner, pre_model_load_memory)
    arguments = model_runner.server_args
    if model_runner.is_draft_worker or arguments.disable_cuda_graph or arguments.device != "cuda":
        return available
    try:
        config = read_config(os.environ)
    except ConfigError:
        return available  # the process is about to end with that error
    if config is None or server_refusals(arguments):
        return available
    budget = budget_bytes(arguments, model_runner.model_config)
    logger.info(
        "Speculation switch: %.2f GB set aside for OFF steps before the KV pool is sized.",
        budget / 2**30,
    )
    return available - budget


def budget_bytes(arguments: Any, model_config: Any) -> int:
    """Estimate both backends' buffers, the graphs, and the outputs that they hold."""
    rows = arguments.max_running_requests
    sizes = capture_sizes(list(arguments.cuda_graph_bs or []), rows)
    _, decode_backend = arguments.get_attention_backends()
    per_slot = BYTES_PER_SLOT.get(decode_backend, max(BYTES_PER_SLOT.values()))
    if decode_backend in ("fa3", "fa4"):  # page tables shrink with the page
        per_slot = -(-per_slot // arguments.page_size)
    slots = 2 * rows * model_config.context_len * per_slot // 2
    outputs = rows * (4 * model_config.vocab_size + 2 * 4 * model_config.hidden_size)
    return int(BASE_BYTES + len(sizes) * GRAPH_BYTES + slots + outputs)
