"""What is set aside for OFF steps before the KV pool is sized."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patch.adapters.memory import budget_bytes, profile_available_bytes, sync_bytes
from tests.unit.sglang_patch.server_arguments import plain_arguments

FREE_BYTES = 64 << 30
BFLOAT16 = SimpleNamespace(itemsize=2)


def runner(*, is_draft_worker: bool = False, **changes: Any) -> SimpleNamespace:
    arguments: dict[str, Any] = {
        "speculative_eagle_topk": 4,
        "disable_cuda_graph": False,
        "max_running_requests": 64,
        "cuda_graph_bs": [1, 8, 64],
        "page_size": 1,
        "get_attention_backends": lambda: ("fa3", "fa3"),
    }
    return SimpleNamespace(
        is_draft_worker=is_draft_worker,
        server_args=plain_arguments(**{**arguments, **changes}),
        model_config=SimpleNamespace(
            context_len=4096, vocab_size=128_256, hidden_size=4096, dtype=BFLOAT16
        ),
    )


def available(model_runner: SimpleNamespace) -> int:
    asked: list[int] = []

    def original(given: Any, before: int) -> int:
        asked.append(before)
        return FREE_BYTES

    left: int = profile_available_bytes(original, model_runner, 100)
    assert asked == [100]
    return left


def test_the_target_gives_up_the_budget_of_off_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD", "8")
    target = runner()
    budget = budget_bytes(target.server_args, target.model_config)
    assert available(target) == FREE_BYTES - budget < FREE_BYTES


@pytest.mark.parametrize(
    "model_runner",
    [
        runner(is_draft_worker=True),
        runner(disable_cuda_graph=True),
        runner(device="cpu"),
        runner(pp_size=2),
    ],
    ids=["draft", "no graphs", "no GPU", "refused"],
)
def test_nothing_is_given_up_where_nothing_is_captured(
    model_runner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD", "8")
    assert available(model_runner) == FREE_BYTES


@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_the_ring_of_a_deferred_sync_is_set_aside_with_and_without_graphs(
    disable_cuda_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD", "8")
    target = runner(disable_cuda_graph=disable_cuda_graph)
    before = available(target)
    monkeypatch.setenv("SGLANG_SPEC_SWITCH_DRAFT_SYNC", "deferred")
    monkeypatch.setenv("SGLANG_SPEC_SWITCH_SYNC_WINDOW", "32")
    ring = 32 * 65 * 3 * 4096 * 2
    assert ring < before - available(target) < ring + (128 << 20)
    assert before - available(target) == sync_bytes(target.server_args, target.model_config, 32)


def test_nothing_is_given_up_without_the_switch() -> None:
    assert available(runner()) == FREE_BYTES
