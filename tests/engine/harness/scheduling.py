"""Drives SGLang's real `Scheduler` event loop in this process: scripted arrivals in, outputs out.

Only the two ends of the loop are replaced: what it receives, and what it sends to the detokenizer.
Needs `tests/engine/cpu` on PYTHONPATH.
"""

import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.managers import scheduler as sglang_scheduler  # before the workers: import cycle
from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetLoadsReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from tests.engine.harness.scenario import (
    DEFAULTS,
    Accounting,
    Case,
    CaseResult,
    Engine,
    Output,
    Request,
)

CASE_LIMIT_S = 600.0
IDLE_ITERATIONS = 3  # at the end of a case, so that the scheduler's own idle checks run


class CaseDoneError(Exception):
    """Leaves the scheduler's endless loop."""


def build_scheduler(
    engine: Engine, models: Path, rank: int = 0, rendezvous: Path | None = None
) -> Any:
    """Return a Scheduler as its process would build it, plugins loaded.

    Its ranks find each other by the file `rendezvous`: a port could be taken meanwhile.
    """
    if rendezvous is None:
        rendezvous = Path(tempfile.mkdtemp(prefix="rendezvous-")) / "ranks"
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = rendezvous.as_uri()
    os.environ["SGLANG_ENABLE_SPEC_V2"] = "1" if engine.spec_v2 else "0"
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    options = {**DEFAULTS, **engine.options, "model_path": str(models / "target")}
    if "speculative_algorithm" in options:
        options["speculative_draft_model_path"] = str(models / "draft")
    load_plugins()
    if parallel_state.model_parallel_is_initialized():  # of an earlier scheduler in this process
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    arguments = ServerArgs(**options)
    sglang_scheduler.configure_logger(arguments)
    return sglang_scheduler.Scheduler(
        arguments,
        PortArgs.init_new(arguments),
        gpu_id=rank,
        tp_rank=rank,
        moe_ep_rank=0,
        pp_rank=0,
        attn_cp_rank=0,
        moe_dp_rank=0,
        dp_rank=None,
    )


class Trace:
    """The plugin's record of decode steps: one JSON object a line, appended by one rank."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read = 0

    @classmethod
    def begin(cls) -> "Trace":
        """Ask the plugin for a record, if this process uses the plugin at all."""
        if not any(name.startswith("SGLANG_SPEC_SWITCH_") for name in os.environ):
            return cls(None)
        with tempfile.NamedTemporaryFile(prefix="switch-trace-", delete=False) as file:
            os.environ["SGLANG_SPEC_SWITCH_TRACE"] = file.name
            return cls(Path(file.name))

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the lines written since the last call."""
        if self._path is None:
            return []
        lines = self._path.read_text().splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]


class Conversation:
    """Feeds one case to a scheduler and collects what it sends."""

    def __init__(self, scheduler: Any, case: Case, trace: "Trace") -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._case = case
        self._iteration = -1
        self._deadline = time.monotonic() + CASE_LIMIT_S
        self._idle_since: int | None = None
        self._open = set(range(len(case.requests)))
        self._sent: set[int] = set()
        self._collected: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
        self._lengths: dict[int, int] = {}
        self._steps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._batch_sizes: list[int] = []

    def run(self) -> CaseResult:
        scheduler = self._scheduler
        process = type(scheduler).process_batch_result
        scheduler.recv_requests = self._receive
        scheduler.send_to_detokenizer.send_output = self._collect
        scheduler.send_to_tokenizer.send_output = self._collect_control
        scheduler.process_batch_result = lambda batch, result: self._observe(process, batch, result)
        scheduler.last_batch = None
        torch.manual_seed(scheduler.tp_rank)  # ranks that sample each for itself would differ
        try:
            scheduler.run_event_loop()
        except CaseDoneError:
            pass
        decided = self._trace.new_lines()
        return CaseResult(
            modes=[line["mode"] for line in decided],
            decided_for=[line["batch"] for line in decided],
            outputs=[self._output(index) for index in range(len(self._case.requests))],
            iterations=self._iteration,
            batch_sizes=self._batch_sizes,
            accounting=self._account(),
            internal_state=self._internal_state(),
            load=self._load(),
        )

    def _receive(self) -> list[Any]:
        self._iteration += 1
        if time.monotonic() > self._deadline:
            raise RuntimeError(f"{self._case.name}: requests {sorted(self._open)} never ended")
        if not self._open and self._scheduler.is_fully_idle():
            self._idle_since = self._iteration if self._idle_since is None else self._idle_since
            if self._iteration - self._idle_since >= IDLE_ITERATIONS:
                raise CaseDoneError
        messages: list[Any] = []
        if self._iteration == 0 and self._case.flush_first:
            messages.append(FlushCacheReqInput())
        for index, request in enumerate(self._case.requests):
            if self._due(request) and index not in self._sent:
                self._sent.add(index)
                messages.append(self._tokenized(index, request))
            if request.abort_at == self._iteration:
                messages.append(AbortReq(rid=f"r{index}."))
        return messages

    def _due(self, request: Request) -> bool:
        if request.follows is not None:
            return request.follows not in self._open
        return request.at == self._iteration

    def _prompt(self, request: Request) -> list[int]:
        if request.follows is None:
            return list(request.prompt)
        earlier = self._case.requests[request.follows]
        return [
            *self._prompt(earlier),
            *self._collected[request.follows]["tokens"],
            *request.prompt,
        ]

    def _tokenized(self, index: int, request: Request) -> TokenizedGenerateReqInput:
        sampling = SamplingParams(
            **{"temperature": 0.0, **request.sampling},
            max_new_tokens=request.max_new_tokens,
            custom_params={"token_ids": list(request.forbidden)} if request.forbidden else None,
        )
        sampling.normalize(self._scheduler.tokenizer)
        sampling.verify(self._scheduler.model_config.vocab_size)
        return TokenizedGenerateReqInput(
            rid=f"r{index}.",  # ends so that r1. is no prefix of r10.: aborts match prefixes
            input_text=None,
            input_ids=self._prompt(request),
            mm_inputs=None,
            sampling_params=sampling,
            return_logprob=request.top_logprobs is not None,
            logprob_start_len=-1,
            top_logprobs_num=request.top_logprobs or 0,
            token_ids_logprob=None,
            stream=False,
            return_hidden_states=request.hidden_states,
            custom_logit_processor=(
                DisallowedTokensLogitsProcessor.to_str() if request.forbidden else None
            ),
            time_stats=APIServerReqTimeStats(),
        )

    def _collect(self, message: Any, _: Any = None) -> None:
        for row, rid in enumerate(getattr(message, "rids", ())):
            index = int(rid[1:-1])
            seen = self._collected[index]
            if message.output_token_logprobs_val:
                seen["logprobs"] += message.output_token_logprobs_val[row] or []
            if message.output_top_logprobs_val:
                for values, ids in zip(
                    message.output_top_logprobs_val[row] or [],
                    message.output_top_logprobs_idx[row] or [],
                    strict=True,
                ):
                    seen["top_logprobs"].append(list(zip(values, ids, strict=True)))
            if (reason := message.finished_reasons[row]) is None:
                continue
            seen["finish"] = reason["type"]
            seen["verify_steps"] = message.spec_verify_ct[row] if message.spec_verify_ct else 0
            seen["cached_tokens"] = message.cached_tokens[row]
            seen["retractions"] = message.retraction_counts[row]
            self._close(index)

    def _collect_control(self, message: Any, _: Any = None) -> None:
        if isinstance(message, FlushCacheReqOutput) and not message.success:
            raise RuntimeError(f"{self._case.name}: the engine was not idle")
        if isinstance(message, AbortReq):  # of a request still waiting
            index = int(message.rid[1:-1])
            self._collected[index]["finish"] = "abort"
            self._close(index)

    def _close(self, index: int) -> None:
        if index not in self._open:
            raise RuntimeError(f"{self._case.name}: request {index} ended twice")
        self._open.remove(index)

    def _observe(self, process: Any, batch: Any, result: Any) -> None:
        """Count the tokens that each step adds: of v1 they appear during the step, of v2 right
        here.
        """
        decode = batch.forward_mode.is_decode()
        requests = [request for request in batch.reqs if not (decode and self._ended(request))]
        process(self._scheduler, batch, result)
        if decode:
            self._batch_sizes.append(len(requests))
        for request in requests:
            index, length = int(request.rid[1:-1]), len(request.output_ids)
            before = self._lengths.get(index, 0)
            if decode and length > before:
                self._steps[index].append((len(self._batch_sizes) - 1, before, length - before))
            self._lengths[index] = length
            self._collected[index]["tokens"] = list(request.output_ids_through_stop)
            # The first entry holds all of the prompt's.
            self._collected[index]["hidden_states"] = request.hidden_states[1:]

    def _ended(self, request: Any) -> bool:
        return int(request.rid[1:-1]) not in self._open

    def _output(self, index: int) -> Output:
        seen = self._collected[index]
        return Output(
            tokens=seen["tokens"],
            finish=seen["finish"],
            verify_steps=seen["verify_steps"] or 0,
            cached_tokens=seen["cached_tokens"] or 0,
            retractions=seen["retractions"] or 0,
            logprobs=seen["logprobs"],
            top_logprobs=seen["top_logprobs"],
            hidden_states=seen["hidden_states"],
            steps=self._steps[index],
        )

    def _internal_state(self) -> dict[str, Any]:
        state = self._scheduler.get_internal_state(GetInternalStateReq()).internal_state
        return {name: state.get(name) for name in ("spec_switch", "avg_spec_accept_length")}

    def _load(self) -> dict[str, Any]:
        load = self._scheduler.get_loads(GetLoadsReqInput(include=["all"]))
        return {"spec_switch": getattr(load, "spec_switch", None)}

    def _account(self) -> Accounting:
        """Compare slots one by one: a slot lost and another counted twice must not cancel out."""
        allocator, cache = self._scheduler.token_to_kv_pool_allocator, self._scheduler.tree_cache
        size = allocator.page_size
        cached = [] if cache.disable else cache.all_values_flatten().tolist()
        free_pages = torch.cat([allocator.free_pages, allocator.release_pages]).tolist()
        owned = Counter(free_pages) + Counter({slot // size for slot in cached})
        owned += Counter({slot: count - 1 for slot, count in Counter(cached).items()})
        rows = self._scheduler.req_to_token_pool
        return Accounting(
            pages_lost=sum(owned[page] == 0 for page in range(1, allocator.size // size + 1)),
            pages_owned_twice=sum(count - 1 for count in owned.values()),
            slots_protected=cache.protected_size(),
            rows_lost=rows.size - len(set(rows.free_slots)),
        )
