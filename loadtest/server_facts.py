"""What a server tells of itself before it is measured: models, version, the flags that matter.

Only the fields named here are kept: `/server_info` also holds the server's keys. A server that does
not answer is no error here: its requests will be counted as failed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.preflight import TIMEOUT_S, UnreachableError, check_server

ANSWER_BYTES_MAX = 4 << 20
TEXT_CHARS_MAX = 256
FLAGS = (
    "model_path",
    "served_model_name",
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "base_gpu_id",
    "mem_fraction_static",
    "max_running_requests",
    "max_queued_requests",
    "max_total_num_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_policy",
    "attention_backend",
    "sampling_backend",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "enable_torch_compile",
    "enable_mixed_chunk",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
)
_SWITCH = ("state", "mode", "off_share", "switches_total", "threshold")
_SIMULATION = ("engine", "source", "interpolated", "clock")
_POLICY = ("name", "threshold", "threshold_down", "dwell_s")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's facts. `problem` says why nothing is known; `clock` is above 1 only if simulated.

    `info` holds flags; of a router its policy and layout.
    """

    problem: str | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    simulation: Mapping[str, object] | None = None
    router: bool = False

    @property
    def clock(self) -> float:
        """Engine seconds per second."""
        told = (self.simulation or {}).get("clock")
        return float(told) if isinstance(told, int | float) and told > 0 else 1.0

    @property
    def version(self) -> str | None:
        """The engine's version."""
        told = self.info.get("version")
        return told if isinstance(told, str) else None

    def to_json(self) -> dict[str, object]:
        """Return the facts as JSON values."""
        found = dict(self.info)
        if self.simulation is not None:
            found["simulation"] = dict(self.simulation)
        return found | ({"problem": self.problem} if self.problem is not None else {})


def ask(url: str, model: str, api_key: str | None) -> ServerFacts:
    """Return a server's facts; InputError if it refuses the key or has not the model."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/")
    try:
        check_server(url, model, api_key)
        with httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False) as http:
            state = _json(http.get(f"{base}/crossover/state"))
            if "policy" in state:
                return ServerFacts(info=_router(state), router=True)
            return _engine(_json(http.get(f"{base}/server_info")))
    except UnreachableError as error:
        return ServerFacts(problem=str(error))
    except httpx.HTTPError:
        return ServerFacts()  # it serves models, and tells nothing of itself


def _json(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200 or len(answer.content) > ANSWER_BYTES_MAX:
        return {}
    try:
        found = json.loads(answer.content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _engine(info: Mapping[str, Any]) -> ServerFacts:
    kept = _kept(info, FLAGS)
    if isinstance(info.get("spec_switch"), dict):
        kept["spec_switch"] = _kept(info["spec_switch"], _SWITCH)
    told = info.get("simulation")
    simulation = _kept(told, _SIMULATION) if isinstance(told, dict) else None
    return ServerFacts(info=kept, simulation=simulation)


def _router(state: Mapping[str, Any]) -> dict[str, object]:
    policy = state["policy"]
    kept = _kept(state, ("version", "layout"))
    return kept | {"policy": _kept(policy, _POLICY) if isinstance(policy, dict) else None}


def _kept(told: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    """Return the named values that are plain; what is not told is left out."""
    return {name: told[name] for name in names if name in told and _plain(told[name])}


def _plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_CHARS_MAX and value.isprintable()
    return value is None or isinstance(value, bool | int | float)
