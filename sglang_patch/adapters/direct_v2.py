"""v2: an OFF step without the stock verification.

Under overlap scheduling the CPU prepares a step while the GPU runs the last one. Where the forward
is short, what the CPU has to launch sets the pace.
"""

from typing import Any

from sglang_patch.adapters.direct import next_tokens
from sglang_patch.adapters.off_state import OffState, drafting
from sglang_patch.adapters.one_node import one_node_verify_input


def direct_step(worker: Any, batch: Any, off: OffState, sync: Any = None) -> Any:
    """Run an OFF step of a worker batch that `is_direct`: target, next token, draft extend
    (eagle_worker_v2.py:573-661, 979-1125), or what `sync` keeps for a later one.

    Every request yields one token, which the CPU need not be told by the GPU.
    """
    import torch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    device = torch.get_device_module(worker.device)
    # Made on the scheduler's stream: keep its memory until the forward stream has read it.
    batch.seq_lens.record_stream(device.current_stream())
    rows, seq_lens_after = len(batch.seq_lens), batch.seq_lens + 1
    target = _forward_target(worker, batch, off, seq_lens_after)
    tokens = next_tokens(batch, target.logits_output)
    following = EagleDraftInput(
        bonus_tokens=tokens, new_seq_lens=seq_lens_after, verify_done=device.Event()
    )
    following.verify_done.record()
    states = target.logits_output.hidden_states
    if sync is not None:
        sync.keep(batch, states, tokens)
    else:
        following.topk_p, following.topk_index, following.hidden_states = extend_draft(
            worker.draft_worker, batch, off, states, tokens
        )
    return GenerationBatchResult(
        logits_output=target.logits_output,
        next_token_ids=tokens,
        can_run_cuda_graph=target.can_run_cuda_graph,
        speculative_num_draft_tokens=1,
        next_draft_input=following,
        accept_lens=torch.ones(rows, dtype=torch.int32),
        routed_experts_output=target.routed_experts_output,
        indexer_topk_output=target.indexer_topk_output,
    )


def _forward_target(worker: Any, batch: Any, off: OffState, seq_lens_after: Any) -> Any:
    """Run the target on the slots that the scheduler has reserved (eagle_info_v2.py:257-332).

    Stock prepares the graph's inputs before the forward, which then copies two of them once more
    (cuda_graph_runner.py:1327-1330).
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative.eagle_info_v2 import assign_extend_cache_locs_func

    verify_input = one_node_verify_input(batch, batch.spec_info.bonus_tokens, off.constants)
    batch.spec_info, batch.input_ids = verify_input, verify_input.draft_token
    batch.out_cache_loc = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=worker.req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens,
        end_offset=seq_lens_after,
        batch_size=len(batch.seq_lens),
        draft_token_num=1,
        device=batch.input_ids.device,
    )
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    return worker.target_worker.forward_batch_generation(batch, is_verify=True)


def extend_draft(
    drafter: Any, batch: Any, off: OffState, states: Any, tokens: Any
) -> tuple[Any, Any, Any]:
    """Extend the draft by one token a request; return what the next draft begins with: the
    candidates' probabilities, the candidates, and the draft's hidden states.

    With one token a request each row is the one that stock would pick, and a graph has picked the
    candidates already (eagle_draft_extend_cuda_graph_runner.py:425).
    """
    import torch
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.spec_utils import maybe_detect_nan
    from sglang.srt.utils import fast_topk

    rows, runner = len(batch.seq_lens), drafter.cuda_graph_runner_for_draft_extend
    extend_input = EagleDraftInput(
        hidden_states=states,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        num_correct_drafts=off.constants.zeros(rows),
        num_accept_tokens=off.constants.ones(rows),
    )
    with drafting(drafter, drafter.draft_runner):
        forward_batch = extend_input.prepare_for_extend_to_fill_draft_kvcache(
            batch, tokens, 1, drafter.draft_runner, runner
        )
        if runner and runner.can_run(forward_batch):
            output = runner.replay(forward_batch)
            topk_p, topk_index = output.topk_p, output.topk_index
        else:
            output = drafter.draft_runner.forward(
                forward_batch, skip_attn_backend_init=True
            ).logits_output
            probabilities = torch.softmax(output.next_token_logits, dim=-1)
            topk_p, topk_index = fast_topk(probabilities, drafter.topk, dim=-1)
    maybe_detect_nan(output.next_token_logits, "draft_extend_for_decode")
    return topk_p, topk_index, output.hidden_states
