"""A Llama-3-8B-shaped target and its EAGLE-3 draft: configurations and tokenizer, no weights."""

import json
from pathlib import Path
from typing import Any

from loadtest.workload import Ask, Fixed, Workload

VOCABULARY = 128_256
CONTEXT_LENGTH = 8192
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
BOS, EOS = VOCABULARY - 256, VOCABULARY - 255

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_models(folder: Path) -> None:
    """Write `target` and `draft` below the folder; SGLang fills them with `--load-format dummy`."""
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32_000,
    }
    tokenizer = _tokenizer()
    for name, own in (("target", target), ("draft", draft)):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(SHAPE | own, indent=1))
        (place / "tokenizer.json").write_text(tokenizer)
        (place / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": f"w{BOS}",
                    "eos_token": f"w{EOS}",
                    "unk_token": "unknown",
                    "chat_template": CHAT_TEMPLATE,
                    "model_max_length": CONTEXT_LENGTH,
                }
            )
        )


def _tokenizer() -> str:
    """One word per id, so that the server's tokenizer and detokenizer work as with a real model.

    The load client's words take the first ids: prompts of unknown words would all be alike, and
    come from the prefix cache.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    asked = Workload("", Fixed(1, 1), seed=1).prompt(Ask(0, 10_000, 1))
    spoken = dict(enumerate(sorted(set(asked.split()))))
    words = {spoken.get(index, f"w{index}"): index for index in range(VOCABULARY - 1)}
    words["unknown"] = VOCABULARY - 1
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()
