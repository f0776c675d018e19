"""A tiny random Llama and an EAGLE-3 draft for it, with acceptance and its failures built in.

The target embeds a token as a unit vector in `TOKEN` dimensions plus a constant in one more, and
its output layer maps each embedding to the successor of the token under a random permutation.
Random layers of strength `CONTEXT_NOISE` bend that, so what comes next depends on the whole
context.

The draft attends from the token it just got to the position whose hidden state, handed over by the
target, says that this token was due there. That finds the token itself, whose embedding then
predicts its successor. Two things make a stale draft fail, as a trained one does:
- a hidden state that was not handed over matches nothing;
- every key that the draft writes carries a penalty, so slots that were never written (all zeros)
  outscore the match and drown it.

Everything is float32 and depends on the seed only.
"""

import json
import re
import string
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 128
TOKEN, HIDDEN = 128, 160  # dimensions that tell tokens apart; all dimensions
CONSTANT = TOKEN  # index of the dimension that every embedding shares
HEADS, HEAD_DIM, INTERMEDIATE = 4, 32, 128
LAYERS = 4  # the draft reads the inputs of layers 1 to 3
DRAFT_VOCABULARY = 104
CONTEXT_LENGTH = 2048
CONTEXT_NOISE = 0.14
SLOW_ROTATION = HEAD_DIM // 2 - 1  # of a head's rotary pairs, the one that hardly turns
MATCH, PENALTY, COPY = 1.5, 1.6, 1.2

SPECIAL = ("<s>", "</s>")
DIGRAMS = re.findall("..", "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiole")


def write_models(folder: Path, seed: int = 0) -> None:
    """Write `target/` and `draft/`, ready for --model-path, into `folder`."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.zeros(VOCABULARY, HIDDEN)
    embedding[:, :TOKEN] = torch.linalg.qr(torch.randn(VOCABULARY, TOKEN, generator=generator)).Q
    embedding[:, CONSTANT] = 0.5
    successor = torch.randperm(VOCABULARY, generator=generator)
    output = torch.zeros(VOCABULARY, HIDDEN)
    output[successor, :TOKEN] = 0.8 * embedding[:, :TOKEN]
    _save(folder / "target", "LlamaForCausalLM", LAYERS, _target(embedding, output, generator), {})
    eagle = {
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
    }
    draft = _draft(embedding, output, successor, generator)
    _save(folder / "draft", "LlamaForCausalLMEagle3", 1, draft, eagle)
    _save_tokenizer(folder / "target")


def _target(
    embedding: torch.Tensor, output: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(LAYERS):
        layer = _random_layer(HIDDEN, generator)
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    return weights


def _random_layer(width: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return gain * torch.randn(rows, columns, generator=generator) / columns**0.5

    return {
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, width, 3.0),
        "self_attn.k_proj.weight": matrix(HEADS * HEAD_DIM, width, 3.0),
        "self_attn.v_proj.weight": matrix(HEADS * HEAD_DIM, width, 1.0),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, CONTEXT_NOISE),
        "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1.0),
        "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1.0),
        "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, CONTEXT_NOISE),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _draft(
    embedding: torch.Tensor,
    output: torch.Tensor,
    successor: torch.Tensor,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    layer = _random_layer(2 * HIDDEN, generator)
    tokens = embedding[:, :TOKEN]
    due = tokens[successor].T @ tokens  # embedding of a token -> embedding of its successor
    query, key, value = (torch.zeros(HEADS * HEAD_DIM, 2 * HIDDEN) for _ in range(3))
    matched = [d for d in range(HEAD_DIM) if d % (HEAD_DIM // 2) != SLOW_ROTATION]
    for head in range(HEADS):
        rows = torch.tensor(matched) + head * HEAD_DIM
        seen = torch.linalg.qr(torch.randn(TOKEN, len(matched), generator=generator)).Q.T
        query[rows, :TOKEN] = MATCH * seen
        key[rows, HIDDEN : HIDDEN + TOKEN] = MATCH * seen @ due
        query[head * HEAD_DIM + SLOW_ROTATION, CONSTANT] = PENALTY
        key[head * HEAD_DIM + SLOW_ROTATION, CONSTANT] = -PENALTY
        block = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        value[block, block] = torch.eye(HEAD_DIM)
    carry = torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    carry[:TOKEN] = COPY * torch.eye(TOKEN)
    layer["self_attn.q_proj.weight"], layer["self_attn.k_proj.weight"] = query, key
    layer["self_attn.v_proj.weight"], layer["self_attn.o_proj.weight"] = value, carry
    layer["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"] * 0.3
    layer["hidden_norm.weight"] = torch.ones(HIDDEN)
    kept = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    return {
        **{f"midlayer.{name}": value for name, value in layer.items()},
        "fc.weight": torch.cat([torch.eye(HIDDEN) / 3] * 3, 1),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": output[kept],
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
    }


def _save(
    folder: Path, architecture: str, layers: int, weights: dict[str, torch.Tensor], extra: dict
) -> None:
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | extra, indent=1))
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )


def _save_tokenizer(folder: Path) -> None:
    """Characters and the most frequent pairs of letters: any ASCII prompt, printable output,
    JSON grammars.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    printable = [c for c in string.printable if c.isprintable()] + ["\n"]
    words = [*SPECIAL, *printable, *DIGRAMS]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[(pair[0], pair[1]) for pair in DIGRAMS],
            unk_token=SPECIAL[0],
        )
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "unk_token": SPECIAL[0],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['role'] }}: "
        "{{ message['content'] }}\n{% endfor %}assistant: ",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
