"""The server arguments of a speculating server that nothing is wrong with."""

from types import SimpleNamespace
from typing import Any


def plain_arguments(**changes: Any) -> SimpleNamespace:
    """What the plugin asks of SGLang's arguments before it switches anything."""
    plain: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3",
        "enable_dp_attention": False,
        "enable_lora": None,
        "lora_paths": None,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "speculative_adaptive": False,
        "enable_multi_layer_eagle": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "attn_cp_size": 1,
        "device": "cuda",
    }
    return SimpleNamespace(**{**plain, **changes})
