"""The engine models by name: four measured on one H200, two drawn through published points.

Step times of the H200 models come from two measurements of SGLang 0.5.12.post1 (256 tokens in and
out, Llama-3-8B shape, simulated accept length 2.2). Start: the decode-only rates of the server's
own log, batch * accept length / rate. What a closed loop took beyond those steps is prefill: over 1
to 256 requests about 25 us a token, and little a pass. Then virtual/closed_loop.derive_points moves
the step times until the model's closed loop runs at the end-to-end rates that were measured;
tests/unit/loadtest/test_engine_table.py holds those rates and the comparison.

The second part moves plain by 0 to +4% and the speculative steps by -16 to +5%, most at 32 and 64
requests. Part of that is not the GPU's: simulated acceptance draws one length a step for the whole
batch, so that the measured requests finished together and their successors were prefilled in one
pass. Here each request has its own luck, as in real traffic, finishes by itself and costs a pass of
its own. End-to-end rates are right, a single step at those loads is a little quick.

Steps with speculation held off follow docs/engine.md. Chain on v2: plain's times what an OFF step
took against a plain one, 8.48 to 7.87 ms at 128 and 12.12 to 11.96 ms at 256; below 128 the ratio
at 128, which is a guess. Tree on v1: the OFF step times at 32 to 256; at one request that of plain
without overlap (180 tok/s) and the 1.9 ms that an OFF step costs more at 32.

The context term is computed, not measured: 131,072 bytes of KV a token read at 80% of 4.8 TB/s. KV
capacity of the tree server is the one that it reported; the plain server's is that times 33/32, as
a token needs no draft layer.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from loadtest.engine_params import Acceptance, DecodeMode, EngineParams

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Milliseconds of one decode step at each of _BATCHES.
_PLAIN_MS = (4.906, 5.071, 5.030, 5.079, 5.209, 5.637, 6.371, 7.946, 12.141)
_TREE_V1_MS = (10.509, 9.568, 9.349, 10.529, 13.687, 20.351, 36.345, 65.296, 131.224)
_CHAIN_V2_MS = (7.759, 7.725, 7.367, 6.621, 7.917, 7.841, 9.537, 16.432, 31.495)
_CHAIN_V1_MS = (10.685, 10.857, 9.401, 9.586, 10.042, 10.268, 12.730, 18.040, 35.927)

_OFF_RATIOS_CHAIN_V2 = (*(8.48 / 7.87,) * 8, 12.12 / 11.96)
_OFF_CHAIN_V2_MS = tuple(p * r for p, r in zip(_PLAIN_MS, _OFF_RATIOS_CHAIN_V2, strict=True))
_OFF_TREE_V1 = ((1, 7.4e-3), (32, 8.3e-3), (64, 9.0e-3), (128, 10.9e-3), (256, 15.4e-3))

_ACCEPT_LENGTH = 2.2
_TREE = Acceptance(_ACCEPT_LENGTH, longest=3)
_CHAIN = Acceptance(_ACCEPT_LENGTH, longest=4)

# SGLang's own limit under speculation, unless it is set.
_SPEC_RUNNING_REQUESTS = 48
_DRAFT_KV_TOKENS = 788_971
_PLAIN_KV_TOKENS = _DRAFT_KV_TOKENS * 33 // 32
_H200_KV_TOKEN_S = 131_072 / (0.8 * 4.8e12)
_H200_SOURCE = (
    "measured: one H200, SGLang 0.5.12.post1, Llama-3-8B shape, simulated accept length 2.2"
)


def _points(step_ms: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((batch, ms / 1e3) for batch, ms in zip(_BATCHES, step_ms, strict=True))


def _h200_spec(
    name: str,
    step_ms: Sequence[float],
    acceptance: Acceptance,
    slots: int,
    off: tuple[tuple[int, float], ...] = (),
) -> EngineParams:
    return EngineParams(
        name=name,
        source=_H200_SOURCE,
        decode=DecodeMode(_points(step_ms), acceptance, step_slots=slots),
        prefill_pass_s=0.004,
        prefill_token_s=28.0e-6,
        kv_tokens=_DRAFT_KV_TOKENS,
        kv_token_s=_H200_KV_TOKEN_S,
        max_running_requests=_SPEC_RUNNING_REQUESTS,
        off=DecodeMode(off) if off else None,
    )


def _field(
    name: str, base_ms: float, slope_ms: float, acceptance: Acceptance | None
) -> EngineParams:
    """A line through whole-node figures: base + slope * n milliseconds per token at n requests.

    The figures hold their prefill, whose cost nobody published; it is left out rather than counted
    twice.
    """
    length = acceptance.mean if acceptance else 1.0
    return EngineParams(
        name=name,
        source="interpolated: a line through published points of 8x RTX PRO 6000",
        interpolated=True,
        decode=DecodeMode(
            tuple((n, (base_ms + slope_ms * n) * length / 1e3) for n in (1, 256)),
            acceptance,
            step_slots=16 if acceptance else 1,
        ),
        prefill_pass_s=0.0,
        prefill_token_s=0.0,
        kv_tokens=500_000 if acceptance else 520_000,
        max_running_requests=_SPEC_RUNNING_REQUESTS if acceptance else 4096,
    )


_ALL = (
    EngineParams(
        name="h200-plain",
        source=_H200_SOURCE,
        decode=DecodeMode(_points(_PLAIN_MS)),
        prefill_pass_s=0.004,
        prefill_token_s=24.0e-6,
        kv_tokens=_PLAIN_KV_TOKENS,
        kv_token_s=_H200_KV_TOKEN_S,
    ),
    _h200_spec("h200-tree-v1", _TREE_V1_MS, _TREE, slots=16, off=_OFF_TREE_V1),
    _h200_spec("h200-chain-v2", _CHAIN_V2_MS, _CHAIN, slots=4, off=_points(_OFF_CHAIN_V2_MS)),
    _h200_spec("h200-chain-v1", _CHAIN_V1_MS, _CHAIN, slots=4),
    _field("field-plain", 9.88, 1.29, None),
    _field("field-eagle", 7.58, 2.82, _TREE),
)

ENGINES: Mapping[str, EngineParams] = MappingProxyType({params.name: params for params in _ALL})
