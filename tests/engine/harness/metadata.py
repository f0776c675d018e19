"""Compares the plugin's FlashAttention metadata with stock's, on buffers of the same shapes: exit 1
if they differ.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import sgl_kernel
import sglang.srt.managers.scheduler  # noqa: F401  before the rest: import cycle
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_patch.adapters.fused_metadata import replay_metadata

sgl_kernel.merge_state_v2 = None  # imported with the backend; no metadata needs it
from sglang.srt.layers.attention.flashattention_backend import (  # noqa: E402
    FlashAttentionBackend,
)

ROWS, CONTEXT = 5, 64
STOCK = FlashAttentionBackend.init_forward_metadata_replay_cuda_graph
BUFFERS = ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table")


def backend(page_size: int, slots: torch.Tensor) -> Any:
    """Return what the method reads of a backend that was captured at one token a request."""

    def captured() -> dict[Any, Any]:
        metadata = SimpleNamespace(
            cache_seqlens_int32=torch.zeros(ROWS, dtype=torch.int32),
            cu_seqlens_q=torch.arange(ROWS + 1, dtype=torch.int32),
            cu_seqlens_k=torch.zeros(ROWS + 1, dtype=torch.int32),
            page_table=torch.zeros(ROWS, CONTEXT // page_size, dtype=torch.int32),
            swa_page_table=None,
        )
        return {ROWS: metadata, "strided_indices": torch.arange(0, CONTEXT, page_size)}

    return SimpleNamespace(
        topk=1,
        page_size=page_size,
        speculative_num_steps=0,
        speculative_num_draft_tokens=1,
        use_sliding_window_kv_pool=False,
        req_to_token=slots,
        target_verify_metadata=captured(),
        draft_extend_metadata=captured(),
        decode_cuda_graph_metadata=captured(),
    )


def compare(mode: ForwardMode, page_size: int) -> None:
    """Fill both backends' buffers for the same batch; raise AssertionError if they differ."""
    seed = torch.Generator().manual_seed(page_size)
    pages = torch.randint(1, 1000, (8, CONTEXT // page_size), generator=seed)
    slots = (pages * page_size).repeat_interleave(page_size, dim=1) + torch.arange(
        CONTEXT
    ) % page_size
    lengths = torch.tensor([3, 40, 17, 16, 1])
    ones = torch.ones(ROWS, dtype=torch.int32)
    batch = {
        "bs": ROWS,
        "req_pool_indices": torch.tensor([6, 1, 3, 0, 2]),
        "seq_lens": lengths.to(torch.int32),
        "seq_lens_sum": int(lengths.sum()),
        "encoder_lens": None,
        "forward_mode": mode,
        "spec_info": SimpleNamespace(extend_seq_lens_tensor=ones, extend_seq_lens_cpu=[1] * ROWS),
        "seq_lens_cpu": lengths,
    }
    stock, fused = (backend(page_size, slots.to(torch.int32)) for _ in range(2))
    STOCK(stock, **batch)
    replay_metadata(fused, partial(STOCK, fused), **batch)
    assert fused.forward_metadata.max_seq_len_k == stock.forward_metadata.max_seq_len_k
    for name in BUFFERS:
        one, other = (getattr(each.forward_metadata, name) for each in (stock, fused))
        assert torch.equal(one, other), (mode, page_size, name, one, other)


if __name__ == "__main__":
    pairs = [
        (mode, page_size)
        for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
        for page_size in (1, 16)
    ]
    for pair in pairs:
        compare(*pair)
    print(len(pairs), "comparisons")
