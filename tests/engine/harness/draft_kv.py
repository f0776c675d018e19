"""Compares the draft KV in the prefix cache after a run with a deferred draft sync with that of the
same run in which each OFF step extends the draft: exit 1 if they differ.

    PYTHONPATH=tests/engine/cpu:. python -m tests.engine.harness.draft_kv MODELS      (on the CPU)
    PYTHONPATH=.:$PYTHONPATH python -m tests.engine.harness.draft_kv --gpu MODELS     (on one GPU)

MODELS holds `target` and `draft`. On a GPU a model of eight layers in the shape of an 8B model is
written there first; its weights are dummies, of which no draft token is ever accepted, but the KV
tells as much.
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine.harness.cases import ENDLESS, prompt
from tests.engine.harness.sabotage import apply_sabotage
from tests.engine.harness.scenario import CHAIN_V2, Case, Request

SCHEDULE, WINDOW = "random:7", "5"
FIRST = [
    Request(prompt(12 + 9 * i, 640 + i), 30 + 11 * i, at=2 * i, sampling=ENDLESS) for i in range(8)
]
# What the last request of the first eight owed is written when another one comes.
CASE = Case(
    "draft-kv",
    [*FIRST, Request(prompt(5, 650), 4, at=-1, follows=len(FIRST) - 1, sampling=ENDLESS)],
)
TOLERANCE = 0.05
"""Distance of a key or value from the expected one, as a share of that one's length: what a sum in
another order makes of it in bfloat16.
"""
ON_GPU = {
    "device": "cuda",
    "dtype": "bfloat16",
    "attention_backend": "fa3",
    "grammar_backend": "none",
    "disable_cuda_graph": False,
    "disable_piecewise_cuda_graph": True,
    "cuda_graph_bs": [1, 2, 4, 8],
    "load_format": "dummy",
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.8,
}
TARGET_LAYERS = 8


def run(sync: str, models: Path, on_gpu: bool, sabotage: str | None, answers: Any) -> None:
    """Serve the case in this process; put tokens, modes, figures and draft KV of each request."""
    settings = {"SCHEDULE": SCHEDULE, "DRAFT_SYNC": sync}
    if sync == "deferred":
        settings["SYNC_WINDOW"] = WINDOW
    os.environ.update({f"SGLANG_SPEC_SWITCH_{name}": value for name, value in settings.items()})
    if sabotage:
        apply_sabotage(sabotage)
    from tests.engine.harness.scheduling import Conversation, Trace, build_scheduler

    engine = CHAIN_V2.with_options("gpu", **ON_GPU) if on_gpu else CHAIN_V2
    trace = Trace.begin()
    scheduler = build_scheduler(engine, models)
    result = Conversation(scheduler, CASE, trace).run()
    texts = [
        [*request.prompt, *output.tokens]
        for request, output in zip(FIRST, result.outputs, strict=False)
    ]
    kept = [_draft_kv(scheduler, text) for text in texts]
    answers.put((texts, result.modes, result.internal_state["spec_switch"], kept))


def _draft_kv(scheduler: Any, text: list[int]) -> Any:
    """Return keys and values of a text's cached positions, one row a position."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found = scheduler.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(text, None)))
    runner = scheduler.draft_worker.draft_worker.draft_runner
    layer = runner.model.model.layers[0].self_attn.attn.layer_id
    buffers = runner.token_to_kv_pool.get_kv_buffer(layer)
    rows = [buffer[found.device_indices].flatten(1).float().cpu() for buffer in buffers]
    return torch.stack(rows).numpy()


def in_process(*arguments: Any) -> Any:
    """Return what `run` answers from a process of its own."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=run, args=(*arguments, answers))
    process.start()
    try:
        return answers.get(timeout=280)
    finally:
        process.kill()
        process.join()


def compare(models: Path, on_gpu: bool, sabotage: str | None) -> bool:
    """Run both, print what was found, and tell whether the draft KV agrees."""
    import numpy as np

    expected = in_process("each-step", models, on_gpu, None)
    found = in_process("deferred", models, on_gpu, sabotage)
    if found[:2] != expected[:2]:
        print("tokens or modes differ: nothing to compare")
        return False
    worst, wrong, positions = 0.0, 0, 0
    for text, one, other in zip(found[0], found[3], expected[3], strict=True):
        if one.shape != other.shape or one.shape[1] < len(text) - 2:
            print(f"{one.shape[1]} and {other.shape[1]} of {len(text)} positions are cached")
            return False
        lengths = np.linalg.norm(other, axis=-1)
        distances = (np.linalg.norm(one - other, axis=-1) / np.maximum(lengths, 1e-9)).max(axis=0)
        worst, wrong = (
            max(worst, float(distances.max())),
            wrong + int((distances > TOLERANCE).sum()),
        )
        positions += len(distances)
    figures = {
        name: found[2][name] for name in ("direct_steps", "deferred_positions", "draft_syncs")
    }
    print(json.dumps({"modes": len(found[1]), **figures}))
    print(f"{positions} positions, {wrong} differ by more than {TOLERANCE}, at most by {worst:.5f}")
    return wrong == 0 and all(figures["draft_syncs"].values())


def main() -> int:
    """0 if the draft KV agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--sabotage", default=None, help="break the deferred run in a named way")
    options = parser.parse_args()
    if options.gpu:
        from tests.gpu.models import write_models
        from tests.gpu.servers import write_plugin

        plugin = write_plugin(options.models / "plugin")
        os.environ["PYTHONPATH"] = f"{plugin}:{os.environ.get('PYTHONPATH', '')}"
        write_models(options.models)
        path = options.models / "target" / "config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": TARGET_LAYERS})
        )
    return 0 if compare(options.models, options.gpu, options.sabotage) else 1


if __name__ == "__main__":
    sys.exit(main())
