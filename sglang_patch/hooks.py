"""Every name of SGLang that the plugin hooks or calls, with the parameters it relies on.

SGLang only logs a hook whose target is missing and serves on without it, so this table is compared
with the installed source before anything is registered.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The process in which a hook belongs."""

    LAUNCHER = "launcher"
    SCHEDULER = "scheduler"


class Kind(StrEnum):
    """How a name is used, and so what must agree."""

    HOOK = "hook"  # parameters must be exactly these
    CALL = "call"  # these parameters must be among its own
    FIELDS = "fields"  # a class whose body must annotate these


@dataclass(frozen=True, slots=True)
class Hook:
    """One row. `target` is `module:Class.name`; `adapter` is `module:function` in
    `sglang_patch.adapters`.
    """

    target: str
    parameters: tuple[str, ...]
    role: Role
    why: str
    adapter: str | None = None
    kind: Kind = Kind.HOOK

    @property
    def module(self) -> str:
        """The module that defines the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """The target as SGLang's hook registry spells it."""
        return self.target.replace(":", ".")


def _hook(
    target: str, parameters: str, adapter: str, why: str, role: Role = Role.SCHEDULER
) -> Hook:
    return Hook(f"sglang.srt.{target}", tuple(parameters.split()), role, why, adapter)


def _call(target: str, parameters: str, why: str, kind: Kind = Kind.CALL) -> Hook:
    return Hook(f"sglang.srt.{target}", tuple(parameters.split()), Role.SCHEDULER, why, kind=kind)


FLAG_HOOKS = (
    _hook(
        "server_args:ServerArgs.add_cli_args",
        "parser",
        "server_args:add_cli_args",
        "adds the flags",
        Role.LAUNCHER,
    ),
    _hook(
        "server_args:ServerArgs.from_cli_args",
        "cls args",
        "server_args:from_cli_args",
        "exports the flags to the environment; refuses",
        Role.LAUNCHER,
    ),
)
LAUNCHER_HOOKS = (
    _hook(
        "server_args:ServerArgs.check_server_args",
        "self",
        "server_args:check_server_args",
        "refuses where no flags are parsed",
        Role.LAUNCHER,
    ),
)
LAUNCH_HOOKS = (
    _hook(
        "entrypoints.engine:_wait_for_scheduler_ready",
        "scheduler_pipe_readers scheduler_procs",
        "launch:wait_for_scheduler_ready",
        "ends the start where a scheduler refused",
        Role.LAUNCHER,
    ),
)
SCHEDULER_HOOKS = (
    _hook(
        "managers.scheduler:Scheduler.maybe_init_draft_worker",
        "self",
        "scheduler:maybe_init_draft_worker",
        "arms the switch",
    ),
    _hook(
        "managers.scheduler:Scheduler.update_running_batch",
        "self batch",
        "scheduler:update_running_batch",
        "decides each decode step",
    ),
    _hook(
        "managers.scheduler:Scheduler.run_event_loop",
        "self",
        "measuring:run_event_loop",
        "goodput: measures step times first",
    ),
    _hook(
        "managers.scheduler:Scheduler.run_batch",
        "self batch pp_proxy_tensors",
        "scheduler:run_batch",
        "v2: OFF steps stay overlapped",
    ),
    _hook(
        "managers.schedule_batch:ScheduleBatch.new_tokens_required_next_decode",
        "self selected_indices",
        "scheduler:new_tokens_required_next_decode",
        "reserves what an OFF step needs",
    ),
    _hook(
        "speculative.eagle_worker:EAGLEWorker.forward_batch_generation",
        "self batch",
        "eagle_v1:forward_batch_generation",
        "v1: proves that the worker is live",
    ),
    _hook(
        "speculative.eagle_worker:EAGLEWorker.draft",
        "self batch",
        "eagle_v1:draft",
        "v1: OFF drafts nothing",
    ),
    _hook(
        "speculative.eagle_worker:EAGLEWorker.verify",
        "self batch",
        "eagle_v1:verify",
        "v1: OFF verifies one token",
    ),
    _hook(
        "speculative.eagle_worker:EAGLEWorker.forward_draft_extend_after_decode",
        "self batch",
        "eagle_v1:forward_draft_extend_after_decode",
        "v1: OFF keeps the draft in step",
    ),
    _hook(
        "speculative.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation",
        "self model_worker_batch",
        "eagle_v2:forward_batch_generation",
        "v2: proves that the worker is live; sizes of a step",
    ),
    _hook(
        "speculative.eagle_worker_v2:EagleDraftWorker.draft",
        "self model_worker_batch",
        "eagle_v2:draft",
        "v2: OFF drafts nothing",
    ),
    _hook(
        "mem_cache.common:release_kv_cache",
        "req tree_cache is_insert",
        "draft_sync:release_kv_cache",
        "v2, deferred draft sync: knows whose slots enter the prefix cache",
    ),
    _hook(
        "managers.scheduler_output_processor_mixin:"
        "SchedulerOutputProcessorMixin.process_batch_result_decode",
        "self batch result",
        "metrics:process_batch_result_decode",
        "knows whose result is counted",
    ),
    _hook(
        "observability.scheduler_metrics_mixin:SchedulerMetricsMixin.update_spec_metrics",
        "self bs num_correct_drafts",
        "metrics:update_spec_metrics",
        "keeps OFF steps out of accept lengths",
    ),
    _hook(
        "observability.scheduler_metrics_mixin:SchedulerMetricsMixin.report_decode_stats",
        "self can_run_cuda_graph running_batch num_correct_drafts",
        "metrics:report_decode_stats",
        "no division by zero; reports the switch",
    ),
    _hook(
        "observability.scheduler_metrics_mixin:SchedulerMetricsMixin.get_loads",
        "self req",
        "metrics:get_loads",
        "spec_switch in /v1/loads",
    ),
    _hook(
        "managers.scheduler:Scheduler.get_internal_state",
        "self recv_req",
        "metrics:get_internal_state",
        "spec_switch in /server_info",
    ),
    _hook(
        "model_executor.model_runner_kv_cache_mixin:"
        "ModelRunnerKVCacheMixin._profile_available_bytes",
        "self pre_model_load_memory",
        "memory:profile_available_bytes",
        "budgets the OFF graphs before the KV pool",
    ),
)
CALLS = (
    _call(
        "speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode",
        "batch batch_result",
        "v2's extend, left out by a diagnostic",
    ),
    _call(
        "managers.schedule_batch:ScheduleBatch.filter_batch",
        "v1_spec_info_filtered",
        "filters before the decision",
    ),
    _call(
        "managers.utils:get_alloc_len_per_decode", "", "v2's reservation, by the server arguments"
    ),
    _call(
        "model_executor.model_runner:ModelRunner._get_attention_backend",
        "init_new_workspace",
        "second target backend",
    ),
    _call(
        "model_executor.cuda_graph_runner:CudaGraphRunner.__init__",
        "model_runner attn_backend speculative_num_steps speculative_num_draft_tokens",
        "second target graph set",
    ),
    _call(
        "speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.__init__",
        "eagle_worker draft_extend_attn_backend speculative_num_steps",
        "one-token extend graphs",
    ),
    _call(
        "speculative.draft_utils:DraftBackendFactory.__init__",
        "server_args draft_model_runner topk speculative_num_steps",
        "extend backend",
    ),
    _call(
        "speculative.draft_utils:DraftBackendFactory.create_draft_extend_backend",
        "",
        "extend backend",
    ),
    _call(
        "speculative.eagle_info:EagleVerifyInput",
        "draft_token custom_mask positions retrieve_index retrieve_next_token "
        "retrieve_next_sibling retrieve_cum_len spec_steps topk draft_token_num "
        "capture_hidden_mode seq_lens_sum seq_lens_cpu",
        "one-node verify input",
        Kind.FIELDS,
    ),
    _call(
        "speculative.eagle_info:EagleDraftInput",
        "hidden_states topk_p topk_index bonus_tokens capture_hidden_mode new_seq_lens verify_done "
        "num_correct_drafts num_accept_tokens num_tokens_per_req num_tokens_for_logprob_per_req",
        "next draft input",
        Kind.FIELDS,
    ),
    _call(
        "managers.utils:GenerationBatchResult",
        "logits_output next_token_ids num_correct_drafts num_correct_drafts_per_req_cpu "
        "can_run_cuda_graph speculative_num_draft_tokens next_draft_input accept_lens "
        "routed_experts_output indexer_topk_output",
        "a step's result",
        Kind.FIELDS,
    ),
    _call(
        "managers.io_struct:GetLoadsReqOutput",
        "dp_rank num_running_reqs speculative",
        "load answer, extended",
        Kind.FIELDS,
    ),
    _call("utils:get_available_gpu_memory", "device gpu_id empty_cache", "memory in the log"),
    _call(
        "utils:broadcast_pyobj", "data rank dist_group src", "goodput: ranks share what is learnt"
    ),
    _call("managers.scheduler:Scheduler.is_fully_idle", "", "goodput: measures step times"),
    _call("managers.scheduler:Scheduler.flush_cache", "", "goodput: measures step times"),
    _call(
        "managers.io_struct:TokenizedGenerateReqInput",
        "input_text input_ids mm_inputs sampling_params return_logprob logprob_start_len "
        "top_logprobs_num token_ids_logprob stream",
        "goodput: measures step times",
        Kind.FIELDS,
    ),
    _call("managers.io_struct:AbortReq", "abort_all", "goodput: measures step times", Kind.FIELDS),
    _call(
        "sampling.sampling_params:SamplingParams.__init__",
        "temperature max_new_tokens ignore_eos",
        "goodput: measures step times",
    ),
)
DIRECT_CALLS = (
    _call(
        "managers.tp_worker:TpModelWorker.forward_batch_generation",
        "model_worker_batch is_verify",
        "direct step: target",
    ),
    _call(
        "managers.schedule_batch:ScheduleBatch.get_model_worker_batch",
        "",
        "v1, direct step: target",
    ),
    _call("mem_cache.common:alloc_for_decode", "batch token_per_req", "v1, direct step: KV slots"),
    _call(
        "speculative.eagle_info_v2:assign_extend_cache_locs_func",
        "req_pool_indices req_to_token start_offset end_offset batch_size draft_token_num device",
        "v2, direct step: KV slots",
    ),
    _call(
        "speculative.eagle_info_v2:EagleVerifyInputV2Mixin.sample",
        "batch logits_output",
        "direct step: tokens that are not greedy",
    ),
    _call(
        "speculative.eagle_info:EagleDraftExtendInput",
        "hidden_states num_correct_drafts num_accept_tokens num_accept_tokens_cpu input_ids "
        "seq_lens seq_lens_cpu req_pool_indices",
        "v1, direct step: draft extend",
        Kind.FIELDS,
    ),
    _call(
        "speculative.eagle_info_v2:EagleDraftInputV2Mixin.prepare_for_extend_to_fill_draft_kvcache",
        "batch predict num_draft_tokens draft_model_runner cuda_graph_runner",
        "v2, direct step: draft extend",
    ),
    _call(
        "speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.replay",
        "forward_batch",
        "v2, direct step: draft extend",
    ),
    _call(
        "speculative.eagle_info:EagleDraftInput.filter_batch",
        "new_indices has_been_filtered",
        "v1, direct step: drops requests that ended",
    ),
    _call("managers.schedule_batch:Req.check_finished", "", "v1, direct step: bookkeeping"),
    _call(
        "managers.schedule_batch:Req.update_reasoning_tokens",
        "token_id think_end_id",
        "v1, direct step: bookkeeping",
    ),
    _call(
        "managers.schedule_batch:Req.update_spec_correct_drafts_histogram",
        "num_correct_drafts",
        "v1, direct step: bookkeeping",
    ),
    _call(
        "managers.overlap_utils:FutureMap.resolve_future",
        "model_worker_batch",
        "v2: an OFF step needs the last tokens alone",
    ),
    _call(
        "layers.attention.flashattention_backend:normal_decode_set_metadata",
        "cache_seqlens_int32 cu_seqlens_k page_table req_to_token req_pool_indices strided_indices "
        "max_seq_pages seq_lens seq_len_delta page_size",
        "FlashAttention: metadata of one token a request",
    ),
    _call(
        "layers.attention.flashattention_backend:"
        "FlashAttentionBackend.init_forward_metadata_replay_cuda_graph",
        "bs req_pool_indices seq_lens seq_lens_sum encoder_lens forward_mode spec_info "
        "seq_lens_cpu out_cache_loc",
        "FlashAttention: metadata of one token a request",
    ),
    _call(
        "managers.overlap_utils:FutureMap.store_to_map",
        "future_indices batch_result",
        "v2, deferred draft sync: stores the last tokens alone",
    ),
    _call(
        "models.llama:LlamaAttention.forward_prepare_native",
        "positions hidden_states",
        "v2, deferred draft sync: keys and values",
    ),
    _call(
        "mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
        "layer loc cache_k cache_v k_scale v_scale",
        "v2, deferred draft sync: writes keys and values",
    ),
    _call("utils:is_pin_memory_available", "device", "v2, deferred draft sync: row numbers"),
    _call("speculative.spec_utils:maybe_detect_nan", "tensor msg", "direct step: diagnostic"),
    _call("utils:fast_topk", "values topk dim", "v2, direct step: candidates"),
    _call("observability.trace:get_global_tracing_enabled", "", "direct step: not while traced"),
)
TABLE = (*FLAG_HOOKS, *LAUNCHER_HOOKS, *LAUNCH_HOOKS, *SCHEDULER_HOOKS, *CALLS, *DIRECT_CALLS)
