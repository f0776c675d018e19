"""FlashAttention's metadata of a replayed OFF step, by the kernel that it has for plain decoding.

Stock prepares a verification, and the draft extend after it, with eight small kernels each
(flashattention_backend.py:2035-2068, 2191-2245). With one token a request they are what a plain
decode step is, for which it has one kernel (flashattention_backend.py:2854).
"""

from collections.abc import Callable
from functools import partial
from typing import Any


def fuse_replay_metadata(backend: Any) -> None:
    """Let a backend that only sees one token a request use the kernel; others are left alone."""
    if type(backend).__name__ != "FlashAttentionBackend" or backend.use_sliding_window_kv_pool:
        return
    stock = backend.init_forward_metadata_replay_cuda_graph
    backend.init_forward_metadata_replay_cuda_graph = partial(replay_metadata, backend, stock)


def replay_metadata(  # noqa: PLR0913  the stock method's parameters
    backend: Any,
    stock: Callable[..., None],
    bs: int,
    req_pool_indices: Any,
    seq_lens: Any,
    seq_lens_sum: int,
    encoder_lens: Any,
    forward_mode: Any,
    spec_info: Any,
    seq_lens_cpu: Any,
    out_cache_loc: Any = None,
) -> None:
    """Fill the buffers that the graph of this batch size reads.

    A verification's lengths do not count its token yet, an extend's do. Query offsets count one
    token a request since the capture.
    """
    if forward_mode.is_target_verify() and encoder_lens is None:
        metadata, uncounted = backend.target_verify_metadata[bs], 1
    elif forward_mode.is_draft_extend_v2() and encoder_lens is None:
        metadata, uncounted = backend.draft_extend_metadata[bs], 0
    else:
        stock(
            bs,
            req_pool_indices,
            seq_lens,
            seq_lens_sum,
            encoder_lens,
            forward_mode,
            spec_info,
            seq_lens_cpu,
            out_cache_loc,
        )
        return
    from sglang.srt.layers.attention.flashattention_backend import normal_decode_set_metadata

    page_size = backend.page_size
    metadata.max_seq_len_q = 1
    metadata.max_seq_len_k = int(seq_lens_cpu[:bs].max()) + uncounted
    normal_decode_set_metadata(
        metadata.cache_seqlens_int32,
        metadata.cu_seqlens_k,
        metadata.page_table,
        backend.req_to_token,
        req_pool_indices[:bs],
        None,
        (metadata.max_seq_len_k + page_size - 1) // page_size,
        seq_lens[:bs],
        uncounted,
        page_size,
    )
    backend.forward_metadata = metadata
    backend.forward_metadata_spec_decode_expand = None
