"""v1: the draft extend of an OFF step, launched while the target still computes.

Without overlap scheduling, what the CPU does between two forwards is time that the GPU waits, and
the preparation of the draft extend is a good part of it. Stock extends after `verify()` has copied
the accepted tokens to the CPU. An OFF step accepts one token a request, and which one is on the GPU
as soon as the logits are: so the extend can be prepared before anybody waits for them.

It then runs for requests that end in this step, too. That is harmless: their slots are freed later,
and on the GPU whatever reuses them comes later still.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_patch.adapters.swapping import swapped

BORROWED = (
    "forward_mode",
    "input_ids",
    "extend_lens",
    "extend_num_tokens",
    "seq_lens",
    "seq_lens_cpu",
    "req_pool_indices",
    "return_logprob",
    "return_hidden_states",
)
"""What the stock extend sets on the batch (eagle_worker.py:1158-1203, eagle_info.py:933-957)."""
PER_REQUEST = ("bonus_tokens", "hidden_states", "topk_p", "topk_index")


def is_argmax(batch: Any) -> bool:
    """Tell whether the next tokens are the largest logits as they come from the model."""
    sampling = batch.sampling_info
    return not (
        not sampling.is_all_greedy
        or batch.has_grammar
        or sampling.has_custom_logit_processor
        or sampling.logit_bias is not None
        or sampling.penalizer_orchestrator.is_required
    )


def extend_before_bookkeeping(worker: Any, batch: Any) -> None:
    """Let `verify()` of this batch's one-node input begin with the extend (eagle_worker.py:982)."""
    batch.spec_info.verify = partial(_verify, worker, batch.spec_info.verify)


def _verify(
    worker: Any, stock: Callable[..., Any], batch: Any, logits_output: Any, *rest: Any
) -> Any:
    worker.spec_switch_extended = _extend(worker, batch, logits_output)
    return stock(batch, logits_output, *rest)


def _extend(worker: Any, batch: Any, logits_output: Any) -> Any:
    """Extend all requests of the batch by their next token; return the next draft input."""
    import torch
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    rows = len(batch.reqs)
    ones = torch.ones(rows, dtype=torch.int32, device=batch.device)
    extend_input = EagleDraftExtendInput(
        hidden_states=batch.spec_info.hidden_states,
        num_correct_drafts=torch.zeros_like(ones),
        num_accept_tokens=ones,
        num_accept_tokens_cpu=[1] * rows,
        input_ids=torch.argmax(logits_output.next_token_logits, dim=-1).to(torch.int32),
        seq_lens=batch.seq_lens + 1,
        seq_lens_cpu=batch.seq_lens_cpu + 1,
        req_pool_indices=batch.req_pool_indices,
    )
    borrowed = {name: getattr(batch, name) for name in BORROWED}
    with (
        worker.draft_tp_context(worker.draft_model_runner.tp_group),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
        swapped(batch, spec_info=extend_input, **borrowed),
    ):
        return worker.forward_draft_extend_after_decode(batch)


def unfinished(extended: Any, batch: Any) -> Any:
    """Return the next draft input of the requests that go on, as stock would have made it."""
    import torch

    rows = [row for row, request in enumerate(batch.reqs) if not request.finished()]
    if len(rows) < len(batch.reqs):
        index = torch.tensor(rows, dtype=torch.int64, device=batch.device)
        for name in PER_REQUEST:
            setattr(extended, name, getattr(extended, name)[index])
    return extended
