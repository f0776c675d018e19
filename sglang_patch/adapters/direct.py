"""OFF steps without the stock verification, for batches that need none of its features: what both
workers share.

Stock verifies a tree of any shape: it builds, masks, compares, strides, and launches a kernel for
each of these. The outcome of one node is known without: its token is the next one, and one KV slot
a request is taken.
"""

from typing import Any


def is_direct(batch: Any) -> bool:
    """Tell whether the next tokens depend on nothing but logits, temperature, top-k and top-p.

    `batch` is v1's schedule batch or v2's worker batch, whose penalties are already tensors.
    """
    from sglang.srt.observability.trace import get_global_tracing_enabled

    sampling = batch.sampling_info
    penalties = sampling.penalizer_orchestrator
    return not (
        batch.forward_mode.is_idle()
        or batch.has_grammar
        or batch.return_logprob
        or sampling.has_custom_logit_processor
        or sampling.logit_bias is not None
        or (penalties is not None and penalties.is_required)
        or sampling.acc_additive_penalties is not None
        or sampling.acc_scaling_penalties is not None
        or get_global_tracing_enabled()
    )


def next_tokens(batch: Any, logits_output: Any) -> Any:
    """Return the token after each request's last one, int32 as stock's (eagle_info.py:277).

    What is not greedy is sampled by the stock method, which does no bookkeeping
    (eagle_info_v2.py:334-490).
    """
    import torch
    from sglang.srt.speculative.spec_utils import maybe_detect_nan

    logits = logits_output.next_token_logits
    maybe_detect_nan(logits, "verify: target model logits")
    if batch.sampling_info.is_all_greedy:
        return torch.argmax(logits, dim=-1).to(torch.int32)
    tokens, _, _ = batch.spec_info.sample(batch, logits_output)
    return tokens
