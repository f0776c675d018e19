"""The verify input of an OFF step: a tree of one node, the last token of each request."""

from dataclasses import dataclass
from typing import Any

GROWTH = 2
"""Constants that became too short are made this many times as long as what is asked for."""


@dataclass(slots=True)
class Constants:
    """Tensors that hold the same values in every OFF step: made once on the device and sliced,
    since each launch of a kernel is time that the CPU spends between two forwards.
    """

    device: Any
    _mask: Any = None
    _index: Any = None
    _no_child: Any = None
    _ones: Any = None
    _zeros: Any = None

    def mask(self, length: int) -> Any:
        """Return True, `length` times."""
        import torch

        if self._mask is None or len(self._mask) < length:
            self._mask = torch.ones(GROWTH * length, dtype=torch.bool, device=self.device)
        return self._mask[:length]

    def tree(self, rows: int) -> tuple[Any, Any]:
        """Return each row's number, and -1 for "no child", both (rows, 1)."""
        self._grow(rows)
        return self._index[:rows], self._no_child[:rows]

    def ones(self, rows: int) -> Any:
        """Return int32 ones, one a row."""
        self._grow(rows)
        return self._ones[:rows]

    def zeros(self, rows: int) -> Any:
        """Return int32 zeros, one a row."""
        self._grow(rows)
        return self._zeros[:rows]

    def _grow(self, rows: int) -> None:
        import torch

        if self._index is not None and len(self._index) >= rows:
            return
        size = GROWTH * rows
        self._index = torch.arange(size, dtype=torch.int64, device=self.device).unsqueeze(1)
        self._no_child = torch.full((size, 1), -1, dtype=torch.int64, device=self.device)
        self._ones = torch.ones(size, dtype=torch.int32, device=self.device)
        self._zeros = torch.zeros(size, dtype=torch.int32, device=self.device)


def one_node_verify_input(batch: Any, bonus_tokens: Any, constants: Constants) -> Any:
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
    index, no_child = constants.tree(rows)
    return EagleVerifyInput(
        draft_token=bonus_tokens.to(torch.int64),
        # One query sees its whole context and itself: seq_len + 1 ones a request.
        custom_mask=constants.mask(batch.seq_lens_sum + rows),
        positions=batch.seq_lens.to(torch.int64),
        retrieve_index=index,
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
