from itertools import pairwise
from types import SimpleNamespace

import pytest

from sglang_patch.adapters.memory import budget_bytes
from sglang_patch.adapters.off_state import capture_sizes
from sglang_patch.adapters.swapping import swapped


@pytest.mark.parametrize(
    ("configured", "largest"), [([1, 2, 4, 8], 256), ([1, 512], 48), ([], 1), ([16], 16)]
)
def test_captured_sizes_reach_the_largest_running_batch(
    configured: list[int], largest: int
) -> None:
    sizes = capture_sizes(configured, largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert {size for size in configured if size <= largest} <= set(sizes)
    beyond = [size for size in sizes if size >= max(configured, default=0)]
    assert all(after - before <= 32 for before, after in pairwise(beyond))


def test_borrowed_attributes_come_back_after_an_error() -> None:
    worker = SimpleNamespace(steps=3, backend="spec")
    seen = []

    def borrow() -> None:
        with swapped(worker, steps=0, backend="off"):
            seen.append((worker.steps, worker.backend))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        borrow()
    assert seen == [(0, "off")]
    assert (worker.steps, worker.backend) == (3, "spec")


def test_the_budget_grows_with_the_batch_and_the_context() -> None:
    def budget(rows: int, context: int) -> int:
        arguments = SimpleNamespace(
            max_running_requests=rows,
            cuda_graph_bs=[1, 8, 64],
            page_size=1,
            speculative_eagle_topk=4,
            get_attention_backends=lambda: ("fa3", "fa3"),
        )
        model = SimpleNamespace(context_len=context, vocab_size=128_256, hidden_size=4096)
        return budget_bytes(arguments, model)

    assert budget(64, 4096) < budget(256, 4096) < budget(256, 131_072)
    assert 256 * 131_072 * 40 < budget(256, 131_072) < 2 * 256 * 131_072 * 40
