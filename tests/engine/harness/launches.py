"""Counts what the CPU launches in one OFF step, outside of the models' forwards, with and without
direct steps, with a deferred draft sync, and in a plain decode step:

    PYTHONPATH=tests/engine/cpu:. python -m cpu_engine.models MODELS
    PYTHONPATH=tests/engine/cpu:. python -m tests.engine.harness.launches MODELS

On a GPU each forward is one graph, and every launch beside them costs the CPU several microseconds.
The count transfers to a GPU; times taken here would not. An operation that only makes a view
launches nothing, and a kernel's double counts once. What an attention backend prepares and what a
graph's inputs take is left out: both are other code there.
"""

import multiprocessing
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.engine.harness.cases import LONG
from tests.engine.harness.scenario import CHAIN_V1, CHAIN_V2, PLAIN, TREE, Engine

SILENT = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias")
WAITS = ("tolist", "item", "cpu")
STOCK, DIRECT, DEFERRED = "stock verification", "direct", "direct, deferred sync"
ARMS = [
    (PLAIN, ""),
    *((engine, kind) for engine in (TREE, CHAIN_V1, CHAIN_V2) for kind in (STOCK, DIRECT)),
    (CHAIN_V2, DEFERRED),
]


class Ledger:
    """What was launched, and how often the CPU read a tensor, while not inside a forward."""

    def __init__(self) -> None:
        self.launches, self.reads, self._inside = 0, 0, 0

    def mode(self) -> Any:
        """Return a context that counts operations."""
        from torch.utils._python_dispatch import TorchDispatchMode

        ledger = self

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if not func.is_view and func.overloadpacket.__name__ not in SILENT:
                    ledger.launches += not ledger._inside
                return func(*args, **(kwargs or {}))

        return Counting()

    def weigh(self, owner: Any, name: str, launches: int) -> None:
        """Count a function as so many launches, whatever it does."""
        function = getattr(owner, name)

        def weighed(*args: Any, **kwargs: Any) -> Any:
            self.launches += 0 if self._inside else launches
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        setattr(owner, name, weighed)

    def note_reads(self, owner: Any, name: str) -> None:
        """Count the calls of a method that gives the CPU a tensor's values."""
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.reads += not self._inside
            return function(*args, **kwargs)

        setattr(owner, name, noted)


def instrument(ledger: Ledger) -> None:
    """Make the ledger see what this process launches."""
    import sgl_kernel
    import torch
    from cpu_engine.index_kernels import IndexKernel
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

    ledger.weigh(ModelRunner, "forward", 0)
    ledger.weigh(TritonAttnBackend, "init_forward_metadata", 0)
    for name in ("verify_tree_greedy", "build_tree_kernel_efficient"):
        ledger.weigh(sgl_kernel, name, 1)
    for name in WAITS:
        ledger.note_reads(torch.Tensor, name)
    launch = IndexKernel.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        holder = Holder(launch(self, grid))
        ledger.weigh(holder, "run", 1)
        return holder.run

    IndexKernel.__getitem__ = counted


class Holder:
    """One launch of a kernel's double."""

    def __init__(self, run: Any) -> None:
        self.run = run


def measure(engine: Engine, kind: str, models: Path) -> tuple[float, float, float]:
    """Return the median and mean launches and the median reads of a decode step, from its launch to
    the next one's.
    """
    if engine != PLAIN:
        os.environ["SGLANG_SPEC_SWITCH_SCHEDULE"] = "off"
    if kind == DEFERRED:
        os.environ["SGLANG_SPEC_SWITCH_DRAFT_SYNC"] = "deferred"
    from tests.engine.harness.scheduling import Conversation, Trace, build_scheduler

    scheduler = build_scheduler(engine, models)
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    if kind == STOCK:
        from sglang_patch.adapters import eagle_v1, eagle_v2

        eagle_v1.is_direct = eagle_v2.is_direct = lambda batch: False
    ledger = Ledger()
    instrument(ledger)
    starts: list[tuple[bool, int, int]] = []
    run_batch = scheduler.run_batch

    def started(batch: Any, *rest: Any) -> Any:
        starts.append((batch.forward_mode.is_decode(), ledger.launches, ledger.reads))
        return run_batch(batch, *rest)

    scheduler.run_batch = started
    with ledger.mode():
        Conversation(scheduler, LONG, Trace(None)).run()
    steps = [(one, other) for one, other in pairwise(starts) if one[0] and other[0]]
    launches = [other[1] - one[1] for one, other in steps]
    reads = statistics.median(other[2] - one[2] for one, other in steps)
    return statistics.median(launches), statistics.mean(launches), reads


def report(engine: Engine, kind: str, models: Path) -> None:
    """Measure in this process and print a line."""
    median, mean, reads = measure(engine, kind, models)
    figures = f"{median:8.0f} launches (mean {mean:.1f}){reads:6.0f} reads"
    print(f"{engine.name:20}{kind:24}{figures}", flush=True)


if __name__ == "__main__":
    for arm in ARMS:
        process = multiprocessing.get_context("spawn").Process(
            target=report, args=(*arm, Path(sys.argv[1]))
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{arm[0].name}: ended with status {process.exitcode}")
