"""The verify input of an OFF step: a tree of one node, the last token of each request."""

from typing import Any


def one_node_verify_input(batch: Any, bonus_tokens: Any) -> Any:
    """Build what `draft()` would return had it drafted nothing. `batch` is v1's schedule batch or
    v2's worker batch.

    Stock `verify()` then samples one token a request and does all bookkeeping
    (eagle_info.py:236-666, eagle_info_v2.py:334-490). topk 1 keeps it off the branch that moves
    accepted slots of a tree on pages (eagle_info.py:506-545). Tokens are int64 for the greedy
    kernel, while the bonus tokens of a draft extend are int32 (eagle_info.py:957).
    """
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    rows = len(batch.seq_lens)
    device = batch.seq_lens.device
    no_child = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
    return EagleVerifyInput(
        draft_token=bonus_tokens.to(torch.int64),
        # One query sees its whole context and itself: seq_len + 1 ones a request.
        custom_mask=torch.ones(batch.seq_lens_sum + rows, dtype=torch.bool, device=device),
        positions=batch.seq_lens.to(torch.int64, copy=True),
        retrieve_index=torch.arange(rows, dtype=torch.int64, device=device).unsqueeze(1),
        retrieve_next_token=no_child,
        retrieve_next_sibling=no_child,
        retrieve_cum_len=None,
        spec_steps=0,
        topk=1,
        draft_token_num=1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )


def stale_draft_input(rows: int, drafter: Any, **fields: Any) -> Any:
    """Build a next draft input without running the draft: zeros of the right shapes. Diagnostic
    only.
    """
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    width, kind = EagleDraftInput.hidden_size_for(drafter), EagleDraftInput.dtype_for(drafter)
    return EagleDraftInput(
        hidden_states=torch.zeros((rows, width), dtype=kind, device=drafter.device),
        topk_p=torch.zeros((rows, drafter.topk), dtype=torch.float32, device=drafter.device),
        topk_index=torch.zeros((rows, drafter.topk), dtype=torch.int64, device=drafter.device),
        capture_hidden_mode=CaptureHiddenMode.LAST,
        **fields,
    )
