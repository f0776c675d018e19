"""Torch stand-ins, for speed only, under SGLang's own Triton attention backend.

The Triton kernels of the same names give the same tokens in the interpreter, some forty times
slower. All metadata (index pointers, slot numbers, masks) is still computed by SGLang.
"""

import torch


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """[q, heads, dim] x [k, kv heads, dim] -> [q, heads, dim]; `visible` is [q, k], None: all."""
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _refuse_what_is_not_modelled(logit_cap, sinks, xai_temperature_len, k_scale, v_scale) -> None:
    if (
        logit_cap
        or sinks is not None
        or xai_temperature_len > 0
        or (k_scale, v_scale) != (1.0, 1.0)
    ):
        raise NotImplementedError("the CPU attention of the tests has no such feature")


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    kv_indptr,
    kv_indices,
    attn_logits,
    attn_lse,
    num_kv_splits,
    max_kv_splits,
    sm_scale,
    k_scale,
    v_scale,
    logit_cap=0.0,
    sinks=None,
    xai_temperature_len=-1,
    has_mla=False,
    use_pdl=False,
) -> None:
    """One query per row, over the cached slots of that row."""
    _refuse_what_is_not_modelled(logit_cap, sinks, xai_temperature_len, k_scale, v_scale)
    bounds = kv_indptr.tolist()
    for row in range(q.shape[0]):
        slots = kv_indices[bounds[row] : bounds[row + 1]]
        o[row] = _attend(q[row : row + 1], k_buffer[slots], v_buffer[slots], sm_scale, None)[0]


def extend_attention_fwd(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    custom_mask,
    is_causal,
    mask_indptr,
    max_len_extend,
    k_scale,
    v_scale,
    sm_scale=None,
    logit_cap=0.0,
    skip_prefix_custom_mask=True,
    sliding_window_size=-1,
    sinks=None,
    window_kv_offsets=None,
    xai_temperature_len=-1,
) -> None:
    """Several new queries per request: the cached prefix, then the new tokens causally or by the
    tree's mask.
    """
    _refuse_what_is_not_modelled(logit_cap, sinks, xai_temperature_len, k_scale, v_scale)
    if sliding_window_size > 0:
        raise NotImplementedError("the CPU attention of the tests has no sliding window")
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    new, old = qo_indptr.tolist(), kv_indptr.tolist()
    masks = mask_indptr.tolist() if custom_mask is not None else None
    for request in range(len(new) - 1):
        rows = slice(new[request], new[request + 1])
        slots = kv_indices[old[request] : old[request + 1]]
        count, prefix = rows.stop - rows.start, len(slots)
        if count == 0:
            continue
        visible = torch.ones(count, prefix + count, dtype=torch.bool)
        if masks is not None:
            start = masks[request]
            tree = custom_mask[start : start + count * (prefix + count)].view(count, -1).bool()
            first = prefix if skip_prefix_custom_mask else 0
            visible[:, first:] = tree[:, first:]
        elif is_causal:
            visible[:, prefix:].tril_()
        keys = torch.cat([k_buffer[slots], k_extend[rows].view(count, *k_buffer.shape[1:])])
        values = torch.cat([v_buffer[slots], v_extend[rows].view(count, *v_buffer.shape[1:])])
        o_extend[rows] = _attend(q_extend[rows], keys, values, scale, visible)
