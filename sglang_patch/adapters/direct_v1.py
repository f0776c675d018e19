"""v1: an OFF step without the stock verification.

Without overlap scheduling, what the CPU does between two forwards is time that the GPU waits. Stock
copies the outcome of the verification to the CPU, and only then prepares the draft extend. Here
everything that does not need the tokens is done while the target computes, the draft extend
included, and the CPU waits for the tokens alone, not for the extend behind them.
"""

from typing import Any

from sglang_patch.adapters.direct import next_tokens
from sglang_patch.adapters.off_state import OffState, drafting
from sglang_patch.adapters.one_node import one_node_verify_input


def direct_step(worker: Any, batch: Any, off: OffState) -> Any:
    """Run an OFF step of a batch that `is_direct`; do what stock does to the batch and its requests
    (eagle_worker.py:605-742, 930-1012; eagle_info.py:122-172, 396-648).
    """
    from sglang.srt.managers.utils import GenerationBatchResult

    logits_output, can_run_cuda_graph = _forward_target(worker, batch, off)
    hidden_states = logits_output.hidden_states
    _keep_hidden_states(batch, logits_output)
    tokens = next_tokens(batch, logits_output)
    arriving = _Arriving(tokens)
    following = _extend_draft(worker, batch, off, tokens, hidden_states)
    _account(batch.reqs)
    finished = _append(batch, arriving.wait())
    if finished:
        _keep_unfinished(following, batch)
    batch.spec_info = following
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=tokens,
        num_correct_drafts=0,
        num_correct_drafts_per_req_cpu=[0] * len(batch.reqs),
        can_run_cuda_graph=can_run_cuda_graph,
    )


def _forward_target(worker: Any, batch: Any, off: OffState) -> tuple[Any, bool]:
    """Allocate one slot a request, as a plain decode step does, and run the target."""
    from sglang.srt.mem_cache.common import alloc_for_decode
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    verify_input = one_node_verify_input(batch, batch.spec_info.bonus_tokens, off.constants)
    batch.spec_info, batch.input_ids = verify_input, verify_input.draft_token
    batch.out_cache_loc = alloc_for_decode(batch, token_per_req=1)
    batch.return_hidden_states = False
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    with off.on_target(worker.target_worker.model_runner):
        result = worker.target_worker.forward_batch_generation(
            batch.get_model_worker_batch(), is_verify=True
        )
    batch.forward_mode = ForwardMode.DECODE
    return result.logits_output, result.can_run_cuda_graph


def _keep_hidden_states(batch: Any, logits_output: Any) -> None:
    """Copy what requests asked to see: a draft may add to its input (llama_eagle3.py:110)."""
    if any(request.return_hidden_states for request in batch.reqs):
        logits_output.hidden_states = logits_output.hidden_states.clone()


class _Arriving:
    """Tokens on their way to the CPU. Waiting for them does not wait for what was launched later,
    as `tolist()` would.
    """

    def __init__(self, tokens: Any) -> None:
        import torch

        self._copy = tokens.to("cpu", non_blocking=True)
        self._done = torch.get_device_module(tokens.device).Event()
        self._done.record()

    def wait(self) -> list[int]:
        self._done.synchronize()
        values: list[int] = self._copy.tolist()
        return values


def _extend_draft(worker: Any, batch: Any, off: OffState, tokens: Any, hidden_states: Any) -> Any:
    """Extend the draft by the next token of all requests; return the next draft input.

    It then runs for requests that end in this step, too. That is harmless: their slots are freed
    later, and on the GPU whatever reuses them comes later still.
    """
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    rows = len(batch.reqs)
    batch.seq_lens.add_(1)
    batch.seq_lens_cpu.add_(1)
    ones = off.constants.ones(rows)
    batch.spec_info = EagleDraftExtendInput(
        hidden_states=hidden_states,
        num_correct_drafts=off.constants.zeros(rows),
        num_accept_tokens=ones,
        num_accept_tokens_cpu=[1] * rows,
        input_ids=tokens,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        req_pool_indices=batch.req_pool_indices,
    )
    with drafting(worker, worker.draft_model_runner):
        return worker.forward_draft_extend_after_decode(batch)


def _account(requests: list[Any]) -> None:
    """Count the step in each request, whatever its token (eagle_info.py:452-466)."""
    for request in requests:
        request.decode_batch_idx += 1
        request.kv_committed_len += 1
        request.kv_allocated_len = request.kv_committed_len
        request.spec_verify_ct += 1
        request.update_spec_correct_drafts_histogram(0)


def _append(batch: Any, tokens: list[int]) -> bool:
    """Give each request its token; tell whether any of them has ended (eagle_info.py:427-450)."""
    think_end_id = batch.model_config.think_end_id
    any_finished = False
    for request, token in zip(batch.reqs, tokens, strict=True):
        request.output_ids.append(token)
        if request.require_reasoning and think_end_id is not None:
            request.update_reasoning_tokens(token, think_end_id)
        request.check_finished()
        any_finished = any_finished or request.finished()
    return any_finished


def _keep_unfinished(draft_input: Any, batch: Any) -> None:
    """Drop the rows of requests that ended, as the scheduler's filter expects of v1
    (eagle_info.py:738-754).
    """
    import torch

    rows = [row for row, request in enumerate(batch.reqs) if not request.finished()]
    index = torch.tensor(rows, dtype=torch.int64, device=batch.device)
    draft_input.filter_batch(index, has_been_filtered=False)
