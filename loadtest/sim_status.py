"""What the simulated engine says about itself, in SGLang's fields: loads, server, model."""

from datetime import UTC, datetime
from typing import Any

from loadtest.engine_model import Engine
from loadtest.sim_driver import Driver
from loadtest.sim_metrics import accept_length, accept_rate
from loadtest.switching import SwitchingEngine

VERSION = "0.5.12.post1"


def loads(driver: Driver, include: str | None = None) -> dict[str, Any]:
    """Return /v1/loads with the sections asked for; unknown ones are ignored, as SGLang does."""
    asked = {name.strip() for name in include.split(",")} if include else {"all"}
    engine = driver.engine
    running, waiting, used = engine.num_running, len(engine.waiting), engine.kv_used_tokens
    total = used + sum(sequence.context_tokens for sequence in engine.waiting)
    load: dict[str, Any] = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": used,
        "num_total_tokens": total,
        "max_total_num_tokens": engine.params.kv_tokens,
        "token_usage": round(used / engine.params.kv_tokens, 4),
        "gen_throughput": round(driver.gen_throughput, 2),
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "max_running_requests": engine.max_running_requests,
    }
    length = accept_length(engine)
    if asked & {"all", "spec"}:
        if length is not None:
            load["speculative"] = {"accept_length": length, "accept_rate": accept_rate(engine)}
        load |= _spec_switch(engine)
    if asked & {"all", "disagg"}:
        load["disaggregation"] = {"mode": "null"}
    if asked & {"all", "queues"}:
        load["queues"] = {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0}
    load["num_total_reqs"] = running + waiting
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": VERSION,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "total_used_tokens": used,
            "total_tokens": total,
            "avg_token_usage": load["token_usage"],
            "avg_throughput": load["gen_throughput"],
            "avg_utilization": 0.0,
        },
    }


def server_info(driver: Driver, model_name: str) -> dict[str, Any]:
    """Return /server_info; its field `simulation` says which model this is and if it keeps up."""
    engine, lag = driver.engine, driver.lag
    acceptance = engine.params.decode.acceptance
    return {
        "model_path": model_name,
        "tokenizer_path": model_name,
        "served_model_name": model_name,
        "dtype": "bfloat16",
        "context_length": engine.params.context_tokens,
        "chat_template": None,
        "max_running_requests": engine.max_running_requests,
        "max_queued_requests": engine.max_queued_requests,
        "chunked_prefill_size": engine.params.prefill_pass_tokens,
        "disable_overlap_schedule": False,
        "speculative_algorithm": "EAGLE3" if acceptance else None,
        "max_total_num_tokens": engine.params.kv_tokens,
        "max_req_input_len": engine.params.context_tokens - 6,
        "internal_states": [
            {
                "last_gen_throughput": driver.gen_throughput,
                "effective_max_running_requests_per_dp": engine.max_running_requests,
                **({"avg_spec_accept_length": accept_length(engine)} if acceptance else {}),
                **_spec_switch(engine),
            }
        ],
        "version": VERSION,
        "simulation": {
            "engine": engine.params.name,
            "source": engine.params.source,
            "interpolated": engine.params.interpolated,
            "clock": driver.clock,
            "steps": lag.steps,
            "lag_mean_s": lag.mean_s,
            "lag_max_s": lag.max_s,
            "slipped_s": lag.slipped_s,
        },
    }


def _spec_switch(engine: Engine) -> dict[str, Any]:
    """Return what the plugin adds, nothing where there is none."""
    return {"spec_switch": engine.switch.snapshot()} if isinstance(engine, SwitchingEngine) else {}


def model_info(model_name: str) -> dict[str, Any]:
    """Return /model_info."""
    return {
        "model_path": model_name,
        "tokenizer_path": model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def model_list(driver: Driver, model_name: str) -> dict[str, Any]:
    """Return /v1/models."""
    card = {
        "id": model_name,
        "object": "model",
        "created": int(datetime.now(UTC).timestamp()),
        "owned_by": "sglang",
        "root": model_name,
        "parent": None,
        "max_model_len": driver.engine.params.context_tokens,
    }
    return {"object": "list", "data": [card]}
