"""Measures the step times of both modes before the first request is served.

Requests of its own go through the scheduler's own loop, so that what is measured is what is served:
the captured graphs, the CPU between them, and the overlap.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_patch.adapters.swapping import swapped
from sglang_patch.compat import find_installed
from sglang_patch.config import ConfigError
from sglang_patch.goodput import GoodputRule
from sglang_patch.plan import PLAN_CONTEXT_TOKENS, Item, Recorder, plan
from sglang_patch.rule import Mode
from sglang_patch.step_times import StepTimes, fit
from sglang_patch.switch import Switch
from sglang_patch.times_file import cache_path, read_times, write_times

logger = logging.getLogger(__name__)

FIRST_TOKEN = 10
"""Token ids below are often special."""
ITERATIONS_MAX = 1000
"""Turns of the loop for one batch size; a measurement takes some 40."""


class _DoneError(Exception):
    """Leaves the scheduler's endless loop."""


def run_event_loop(original: Callable[..., Any], scheduler: Any) -> Any:
    """Find the step times first, where the rule needs them."""
    switch: Switch | None = getattr(scheduler, "spec_switch", None)
    waits = switch is not None and switch.reason is None and switch.config.measures
    if switch is None or not waits or hasattr(scheduler, "spec_switch_times"):
        return original(scheduler)
    given = switch.config.times is not None
    times = switch.share(read_given(switch) if given else _read_cached(scheduler, switch))
    if times is None:
        times = switch.share(_measure(original, scheduler, switch))
        _store(scheduler, switch, times)
    scheduler.spec_switch_times = times
    steps = scheduler.server_args.speculative_num_steps
    switch.follow(GoodputRule(times, steps + 1, switch.config.dwell_steps, fixed=given))
    return original(scheduler)


def read_given(switch: Switch) -> StepTimes | None:
    """Read the operator's own file, if one is set; ConfigError on what cannot be read."""
    if switch.config.times is None:
        return None
    try:
        return read_times(Path(switch.config.times))
    except (OSError, ValueError) as error:
        raise ConfigError(f"step times cannot be read: {error}.") from None


def _key(scheduler: Any, switch: Switch) -> dict[str, object]:
    """Return what step times depend on. Weights are known by their path alone."""
    import torch

    arguments, installed = scheduler.server_args, find_installed()
    names = (
        *("model_path", "speculative_draft_model_path", "dtype", "quantization", "kv_cache_dtype"),
        *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        *("tp_size", "page_size", "attention_backend", "decode_attention_backend"),
        *("disable_cuda_graph", "cuda_graph_bs", "disable_overlap_schedule"),
    )
    on_gpu = torch.cuda.is_available() and arguments.device == "cuda"
    return {
        **{name: getattr(arguments, name, None) for name in names},
        "running": scheduler.max_running_requests,
        "device": torch.cuda.get_device_name() if on_gpu else arguments.device,
        "sglang": installed.version if installed else None,
        "sync_window": switch.config.sync_window,
    }


def _path(scheduler: Any, switch: Switch) -> Path:
    return cache_path(_key(scheduler, switch), switch.config.cache, os.environ)


def _read_cached(scheduler: Any, switch: Switch) -> StepTimes | None:
    path = _path(scheduler, switch)
    try:
        times = read_times(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Speculation switch: step times are measured anew: %s", error)
        return None
    logger.info("Speculation switch: step times are those of %s.", path)
    return times


def _store(scheduler: Any, switch: Switch, times: StepTimes) -> None:
    if switch.rank:
        return
    path = _path(scheduler, switch)
    try:
        write_times(path, _key(scheduler, switch), times)
    except OSError as error:
        logger.warning("Speculation switch: step times cannot be kept in %s: %s", path, error)


def _measure(original: Callable[..., Any], scheduler: Any, switch: Switch) -> StepTimes:
    started_s = time.perf_counter()
    recorder = Recorder()
    switch.follow(recorder)
    with _unheard(scheduler, switch), suppress(_DoneError):
        scheduler.recv_requests = _Trial(scheduler, recorder).receive
        original(scheduler)
    scheduler.flush_cache()
    times = fit(recorder.samples)
    logger.info(
        "Speculation switch: step times measured in %.1f s (%d steps). ON ms: %s; OFF ms: %s.",
        time.perf_counter() - started_s,
        len(recorder.samples),
        *(_shown(times, mode) for mode in (Mode.ON, Mode.OFF)),
    )
    return times


def _shown(times: StepTimes, mode: Mode) -> dict[int, float]:
    batches = (times.on if mode is Mode.ON else times.off).batches
    return {size: round(1e3 * times.predict(mode, size, 0), 2) for size in batches}


@contextmanager
def _unheard(scheduler: Any, switch: Switch) -> Iterator[None]:
    """Let nobody hear of these requests: no client, no metrics, no trace; and refuse none."""

    def drop(*_: Any) -> None:
        return

    with (
        swapped(
            scheduler,
            recv_requests=None,
            max_queued_requests=None,
            current_scheduler_metrics_enabled=False,
        ),
        swapped(scheduler.send_to_detokenizer, send_output=drop),
        swapped(scheduler.send_to_tokenizer, send_output=drop),
        swapped(switch, trace=None),
    ):
        yield


class _Trial:
    """Takes the place of what the scheduler receives: one batch size after the other."""

    def __init__(self, scheduler: Any, recorder: Recorder) -> None:
        arguments = scheduler.server_args
        self._scheduler = scheduler
        self._recorder = recorder
        self._new_tokens = recorder.new_tokens(arguments.speculative_num_steps + 1)
        self._items = iter(
            plan(
                running_max=scheduler.max_running_requests,
                request_tokens_max=scheduler.max_req_len - 1,
                pool_tokens=scheduler.max_total_num_tokens,
                new_tokens=self._new_tokens,
                context_tokens=PLAN_CONTEXT_TOKENS,
            )
        )
        self._iterations = 0
        self._ending = True

    def receive(self) -> list[Any]:
        """Return the requests of the next batch size, or the end of this one's."""
        self._iterations += 1
        if self._scheduler.is_fully_idle() and (self._ending or self._iterations > 1):
            return self._begin()
        if not self._ending and (self._recorder.complete or self._iterations > ITERATIONS_MAX):
            self._ending = True
            return [self._abortion()]
        return []

    def _begin(self) -> list[Any]:
        item = next(self._items, None)
        if item is None:
            raise _DoneError
        self._recorder.begin(item.running)
        self._iterations, self._ending = 0, False
        return [self._request(item, index) for index in range(item.running)]

    def _abortion(self) -> Any:
        from sglang.srt.managers.io_struct import AbortReq

        return AbortReq(abort_all=True)

    def _request(self, item: Item, index: int) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        ids = self._scheduler.model_config.vocab_size - FIRST_TOKEN
        prompt = [
            FIRST_TOKEN + (7919 * index + 31 * place) % ids for place in range(item.prompt_tokens)
        ]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self._new_tokens, ignore_eos=True)
        sampling.normalize(self._scheduler.tokenizer)
        return TokenizedGenerateReqInput(
            rid=f"spec-switch-{item.running}-{item.prompt_tokens}-{index}",
            input_text=None,
            input_ids=prompt,
            mm_inputs=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            time_stats=APIServerReqTimeStats(),
        )
