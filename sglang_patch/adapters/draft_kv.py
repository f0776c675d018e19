"""Writes the KV cache of an EAGLE-3 draft without running the draft.

With one layer, keys and values depend on the token and the target's hidden states alone
(llama_eagle3.py:81-98, 191-225): no attention, MLP or output layer is needed to fill the cache.
"""

from typing import Any

DRAFT_MODEL = "LlamaForCausalLMEagle3"


def why_not(draft_model: Any) -> str | None:
    """Return what of a draft model `write_draft_kv` does not know, None if it knows it all."""
    name = type(draft_model).__name__
    if name != DRAFT_MODEL:
        return f"the draft is a {name}, and only {DRAFT_MODEL} is known"
    if len(draft_model.model.layers) != 1:
        return "the draft has more than one layer"
    if draft_model.model.is_mrope_enabled:
        return "the draft's positions have three axes"
    return None


def states_width(draft_model: Any) -> int:
    """Return the length of the target's hidden states for one token, as the draft takes them."""
    return int(draft_model.model.fc.in_features)


def write_draft_kv(
    draft_runner: Any, hidden_states: Any, tokens: Any, positions: Any, slots: Any
) -> None:
    """Write one key and value for each row: the draft's for `positions`, whose hidden states are
    the target's there and whose `tokens` are those that follow.
    """
    import torch

    model = draft_runner.model.model
    layer = model.layers[0]
    if model.fc_norm is not None:
        chunks = hidden_states.chunk(model.num_aux_hidden_states, dim=-1)
        normed = [norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)]
        hidden_states = torch.cat(normed, dim=-1)
    states = layer.hidden_norm(model.fc(hidden_states))
    embeds = layer.input_layernorm(model.embed_tokens(tokens))
    attention = layer.self_attn
    _, keys, values = attention.forward_prepare_native(
        positions, torch.cat([embeds, states], dim=-1)
    )
    heads = (-1, attention.num_kv_heads, attention.head_dim)
    draft_runner.token_to_kv_pool.set_kv_buffer(
        attention.attn,
        slots,
        keys.view(heads),
        values.view(heads),
        attention.attn.k_scale,
        attention.attn.v_scale,
    )
