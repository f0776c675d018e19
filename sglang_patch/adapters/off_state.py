"""What an OFF step runs on: a target attention backend and CUDA graphs for one token a request.

SGLang sizes both by the draft's token count when it builds them, so an OFF step needs its own. They
are built once, after the draft worker (eagle_worker.py:348-403 builds the states of
`--speculative-adaptive` the same way), and borrowed for the length of a call.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_patch.adapters.fused_metadata import fuse_replay_metadata
from sglang_patch.adapters.one_node import Constants
from sglang_patch.adapters.swapping import swapped

logger = logging.getLogger(__name__)

CEILING_STRIDE = 32
"""Gap between the batch sizes that are captured beyond the operator's own list."""


@dataclass(frozen=True, slots=True)
class OffState:
    """Built once per engine. Without CUDA graphs (on a CPU, or disabled) the runners are None."""

    attn_backend: Any
    graph_runner: Any
    extend_backend: Any
    extend_graph_runner: Any
    constants: Constants

    def on_target(self, model_runner: Any) -> AbstractContextManager[None]:
        """Lend the one-token backend and graphs to the target. Prefill and ON steps find their own
        again.
        """
        return swapped(model_runner, attn_backend=self.attn_backend, graph_runner=self.graph_runner)

    def on_draft(self, drafter: Any) -> AbstractContextManager[None]:
        """Lend the one-token extend graphs to the draft; `drafter` is the v1 worker or v2's draft
        worker.
        """
        return swapped(
            drafter,
            draft_extend_attn_backend=self.extend_backend,
            cuda_graph_runner_for_draft_extend=self.extend_graph_runner,
        )


def build_off_state(drafter: Any, target_runner: Any, draft_runner: Any) -> OffState:
    """Build backends and capture graphs. `drafter` is the v1 worker or v2's draft worker.

    The target's backend reads steps, topk and token count from the server arguments in its
    constructor (flashattention_backend.py:144-147, triton_backend.py:110), and so does the capture
    (cuda_graph_runner.py:1414): they are borrowed meanwhile. The draft's extend keeps the real
    topk, since its graph picks the next draft's candidates
    (eagle_draft_extend_cuda_graph_runner.py:104).
    """
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
    from sglang.srt.utils import get_available_gpu_memory

    arguments = target_runner.server_args
    graphs = not arguments.disable_cuda_graph and target_runner.graph_runner is not None
    started, free_before = time.perf_counter(), _free_gb(get_available_gpu_memory, target_runner)
    sizes = capture_sizes(arguments.cuda_graph_bs or [], target_runner.req_to_token_pool.size)
    graph_runner = None
    with one_token(arguments), swapped(arguments, cuda_graph_bs=list(sizes)):
        workspace = target_runner.init_new_workspace
        attn_backend = target_runner._get_attention_backend()
        target_runner.init_new_workspace = workspace
        fuse_replay_metadata(attn_backend)
        if graphs:
            graph_runner = CudaGraphRunner(
                target_runner,
                attn_backend=attn_backend,
                speculative_num_steps=0,
                speculative_num_draft_tokens=1,
            )
    extend_backend, extend_graph_runner = drafter.draft_extend_attn_backend, None
    if graphs:
        with swapped(arguments, cuda_graph_bs=list(sizes)), drafting(drafter, draft_runner):
            extend_backend, extend_graph_runner = _extend(drafter, draft_runner)
    logger.info(
        "Speculation switch: OFF steps use %s, %s; draft extend: %s. "
        "Took %.1f s and %.2f GB; %.2f GB are left.",
        type(attn_backend).__name__,
        f"CUDA graphs for batches of {graph_runner.capture_bs}"
        if graph_runner
        else "no CUDA graphs",
        "one-token CUDA graphs" if extend_graph_runner else "no CUDA graphs",
        time.perf_counter() - started,
        free_before - _free_gb(get_available_gpu_memory, target_runner),
        _free_gb(get_available_gpu_memory, target_runner),
    )
    constants = Constants(target_runner.device)
    return OffState(attn_backend, graph_runner, extend_backend, extend_graph_runner, constants)


@contextmanager
def drafting(drafter: Any, draft_runner: Any) -> Iterator[None]:
    """Enter what stock enters around all that the draft runs: its experts have a backend of their
    own, which a capture records (eagle_worker.py:231-235).
    """
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with (
        drafter.draft_tp_context(draft_runner.tp_group),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


@contextmanager
def one_token(arguments: Any) -> Iterator[None]:
    """Let SGLang believe for a moment that it drafts nothing and verifies one token."""
    with swapped(
        arguments,
        speculative_num_steps=0,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=1,
    ):
        yield


def capture_sizes(configured: list[int], largest: int) -> list[int]:
    """Return the batch sizes to capture: the operator's, continued to the largest running batch.

    OFF is the mode of full batches; beyond the last captured size a step runs eagerly, takes
    several times as long, and the batch stays large: the engine would not come back from there.
    """
    beyond = range(max(configured, default=0) + CEILING_STRIDE, largest, CEILING_STRIDE)
    return sorted({size for size in (*configured, *beyond, largest) if 0 < size <= largest})


def _extend(drafter: Any, draft_runner: Any) -> tuple[Any, Any]:
    """Capture the draft extend at one token a request, on a backend of its own.

    v1 captures an extend on every backend (eagle_worker.py:293), v2 only on Triton
    (eagle_worker_v2.py:317), though FlashAttention handles v2's mode, too
    (flashattention_backend.py:1846, 2191). Elsewhere the extend runs as in ON steps, or eagerly.
    """
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    stock = drafter.draft_extend_attn_backend
    is_v2 = hasattr(drafter, "draft_runner")
    known = ("TritonAttnBackend", "FlashAttentionBackend", "TRTLLMMLABackend")
    if stock is None or (is_v2 and type(stock).__name__ not in known):
        return stock, None
    factory = DraftBackendFactory(
        drafter.server_args, draft_runner, drafter.topk, drafter.speculative_num_steps
    )
    backend = factory.create_draft_extend_backend()
    fuse_replay_metadata(backend)
    return backend, EAGLEDraftExtendCudaGraphRunner(
        drafter, draft_extend_attn_backend=backend, speculative_num_steps=0
    )


def _free_gb(measure: Any, runner: Any) -> float:
    return float(measure(runner.device, runner.gpu_id, empty_cache=False))
