"""Torch stand-ins, for speed only, of the small Triton kernels that compute positions and slots.

Each takes a few milliseconds a launch in Triton's interpreter, which adds up to nine tenths of a
decode step. With CPU_ENGINE_TRITON=1 in the environment SGLang's own kernels run instead.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class IndexKernel:
    """Called as a Triton kernel is: `kernel[grid](...)`."""

    def __init__(self, launch: Callable[..., None], original: Any) -> None:
        self._launch = launch
        self._original = original

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if os.environ.get("CPU_ENGINE_TRITON") == "1":
            return self._original[grid]
        return lambda *args, **kwargs: self._launch(grid, *args, **kwargs)


def replace_in(module: ModuleType) -> None:
    """Replace what the module defines of these kernels."""
    for launch in KERNELS:
        if hasattr(module, launch.__name__):
            original = getattr(module, launch.__name__)
            setattr(module, launch.__name__, IndexKernel(launch, original))


def create_flashinfer_kv_indices_triton(
    grid,
    req_to_token,
    req_pool_indices,
    page_kernel_lens,
    kv_indptr,
    kv_start_idx,
    kv_indices,
    req_to_token_stride,
) -> None:
    """Slots of each request's context, one after the other."""
    (requests,) = grid
    starts = kv_start_idx.tolist() if kv_start_idx is not None else [0] * requests
    offsets, lengths = kv_indptr.tolist(), page_kernel_lens.tolist()
    for request, row in enumerate(req_pool_indices[:requests].tolist()):
        start, length, offset = starts[request], lengths[request], offsets[request]
        kv_indices[offset : offset + length] = req_to_token[row, start : start + length]


def _ranges(requests, req_pool_indices, start_offset, end_offset):
    """For each request: its row, its range of positions, and where that begins in a flat list."""
    rows, starts, ends = (
        values[:requests].tolist() for values in (req_pool_indices, start_offset, end_offset)
    )
    offset = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        yield row, slice(start, end), slice(offset, offset + end - start)
        offset += end - start


def assign_req_to_token_pool(
    grid, req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *sizes
) -> None:
    """Write new slots into the requests' rows."""
    for row, positions, flat in _ranges(grid[0], req_pool_indices, start_offset, end_offset):
        req_to_token[row, positions] = out_cache_loc[flat].to(req_to_token.dtype)


def assign_extend_cache_locs(
    grid, req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *sizes
) -> None:
    """Read slots from the requests' rows."""
    for row, positions, flat in _ranges(grid[0], req_pool_indices, start_offset, end_offset):
        out_cache_loc[flat] = req_to_token[row, positions].to(out_cache_loc.dtype)


def compute_position_kernel(
    grid, positions, extend_start_loc, extend_prefix_lens, extend_seq_lens, has_prefix
) -> None:
    """Positions of the new tokens of each request, and where they begin."""
    lengths = extend_seq_lens.tolist()
    prefixes = extend_prefix_lens.tolist() if has_prefix else [0] * len(lengths)
    offset = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        positions[offset : offset + length] = torch.arange(prefix, prefix + length)
        extend_start_loc[request] = offset
        offset += length


def create_extend_after_decode_spec_info(
    grid, accept_tokens, seq_lens, accept_lens, positions, bonus_tokens, bs_upper
) -> None:
    """Positions of the accepted tokens, and each request's last one.

    Beyond `bs_upper` tokens a request's positions stay unwritten, as they do on a GPU.
    """
    offset = 0
    for request, (length, accepted) in enumerate(
        zip(seq_lens.tolist(), accept_lens.tolist(), strict=True)
    ):
        written = min(accepted, bs_upper)
        first = length - accepted
        positions[offset : offset + written] = torch.arange(first, first + written)
        offset += accepted
        bonus_tokens[request] = accept_tokens[offset - 1]


def generate_draft_decode_kv_indices(
    grid,
    req_pool_indices,
    req_to_token,
    paged_kernel_lens,
    kv_indices,
    kv_indptr,
    positions,
    pool_len,
    kv_indices_stride,
    kv_indptr_stride,
    bs_upper,
    iter_upper,
    num_tokens_upper,
    page_size,
) -> None:
    """For draft step i, per request and branch: slots of the context and of the branch's first
    i + 1 draft tokens.
    """
    steps, requests, branches = grid
    if page_size > 1 and branches > 1:
        raise NotImplementedError("SGLang refuses trees on pages, too")
    tables = [req_to_token[row] for row in req_pool_indices[:requests].tolist()]
    lengths = paged_kernel_lens[:requests].tolist()
    context_ends = positions.cumsum(0).tolist()
    for step in range(steps):
        parts = []
        for table, length in zip(tables, lengths, strict=True):
            for branch in range(branches):
                first = length + branch * steps
                parts += [table[:length], table[first : first + step + 1]]
        slots = torch.cat(parts)
        kv_indices[step, : len(slots)] = slots
        for row in range(1, requests * branches + 1):
            kv_indptr[step, row] = context_ends[row - 1] + row * (step + 1)


KERNELS = (
    create_flashinfer_kv_indices_triton,
    assign_req_to_token_pool,
    assign_extend_cache_locs,
    compute_position_kernel,
    create_extend_after_decode_spec_info,
    generate_draft_decode_kv_indices,
)
