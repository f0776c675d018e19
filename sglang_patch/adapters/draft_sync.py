"""v2: OFF steps without the draft. What its KV cache lacks is kept, and written later in one pass.

Each step keeps, for every request, what the draft would have been given: the target's hidden states
of one position, the token after it, the position and its KV slot. They are written when the ring is
full, before an ON step, and for requests that ended, whose slots the prefix cache has then: all
before the next forward that could read or reuse a slot of theirs. So the draft's cache has no
holes, and nothing is dropped.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

from sglang_patch.adapters.direct_v2 import extend_draft
from sglang_patch.adapters.draft_kv import states_width, write_draft_kv
from sglang_patch.adapters.off_state import OffState
from sglang_patch.sync_window import SyncWindow
from sglang_patch.telemetry import Telemetry

logger = logging.getLogger(__name__)

PASS_TOKENS = 1024
"""Positions written at once: bounds what the pass takes of memory."""


class DraftSync:
    """The ring of one engine. Columns are OFF steps, rows are requests by their `req_pool_idx`.

    A row's column is empty where its slot is 0, which SGLang keeps for what nobody reads.
    """

    def __init__(self, drafter: Any, size: int, telemetry: Telemetry) -> None:
        import torch

        self.window = SyncWindow(size)
        self.telemetry = telemetry
        self._runner = drafter.draft_runner
        self._ended: list[int] = []
        rows = len(drafter.req_to_token_pool.req_to_token)
        device = drafter.device

        def ring(*width: int, dtype: Any) -> Any:
            return torch.zeros((size, rows, *width), dtype=dtype, device=device)

        width = states_width(self._runner.model)
        self._states = ring(width, dtype=drafter.target_worker.model_runner.dtype)
        self._tokens = ring(dtype=torch.int32)
        self._positions, self._slots = (ring(dtype=torch.int64) for _ in range(2))
        logger.info(
            "Speculation switch: the draft may be %d OFF steps behind: a ring of %d requests x %d "
            "hidden values takes %.2f GB.",
            *(size, rows, width, self._states.nbytes / 2**30),
        )

    def keep(self, batch: Any, states: Any, tokens: Any) -> None:
        """Keep what an OFF step of a worker batch leaves for the draft. States are views of what
        the graph's next replay overwrites.
        """
        self.telemetry.deferred_positions += len(batch.seq_lens)
        rows, column = batch.req_pool_indices, self.window.advance()
        self._put(column, rows, states, tokens, batch.seq_lens, batch.out_cache_loc)

    def keep_prompts(self, batch: Any, states: Any, tokens: Any) -> None:
        """Forget what the rows of a prompt pass held for earlier requests. Their draft KV is
        written; an ON step drafts from the last position of each prompt, so that is kept.
        """
        rows, ends, end = batch.req_pool_indices, [], -1
        self._slots.index_fill_(1, rows, 0)
        if not self.window.cold:
            return
        for length in batch.extend_seq_lens:
            end += length
            ends.append(end)
        last = self._on_device(ends)
        slots, column = batch.out_cache_loc[last], self.window.column
        self._put(column, rows, states[last], tokens, batch.seq_lens - 1, slots)

    def _put(
        self, column: int, rows: Any, states: Any, tokens: Any, positions: Any, slots: Any
    ) -> None:
        kept = (
            (self._states, states),
            (self._tokens, tokens),
            (self._positions, positions),
            (self._slots, slots),
        )
        for ring, values in kept:
            ring[column].index_copy_(0, rows, values.to(ring.dtype))

    def ended(self, row: int) -> None:
        """A request ended, and the prefix cache takes its slots over."""
        if self.window.owed(1):
            self._ended.append(row)

    def write_ended(self) -> None:
        """Write what is owed to requests that ended since the last forward."""
        if self._ended:
            rows, self._ended = self._on_device(self._ended), []
            self.telemetry.draft_syncs["end"] += 1
            self._write(rows)

    def make_room(self, batch: Any) -> None:
        """Write what is owed to the requests of a batch if the ring has no room for a step."""
        if self.window.full:
            self.telemetry.draft_syncs["full"] += 1
            self._write(batch.req_pool_indices)
            self.window.mark_written()

    def resume(self, drafter: Any, batch: Any, off: OffState) -> None:
        """Bring the draft up to date before an ON step: write what is owed, and run the draft once
        at the last position of each request, for what the step drafts from.
        """
        if not self.window.cold:
            return
        self.telemetry.draft_syncs["resume"] += 1
        rows, column = batch.req_pool_indices, self.window.column
        self._write(rows)
        earlier = copy.copy(batch)
        earlier.seq_lens = batch.seq_lens - 1
        earlier.seq_lens_cpu = batch.seq_lens_cpu - 1
        earlier.seq_lens_sum = batch.seq_lens_sum - len(batch.seq_lens)
        earlier.out_cache_loc = self._slots[column][rows]
        states, tokens = self._states[column][rows], self._tokens[column][rows]
        following = batch.spec_info
        with off.on_draft(drafter):
            following.topk_p, following.topk_index, following.hidden_states = extend_draft(
                drafter, earlier, off, states, tokens
            )
        self.window.mark_resumed()

    def _write(self, rows: Any) -> None:
        """Write what is owed to some requests, a few steps at a time."""
        for columns in self.window.owed(max(1, PASS_TOKENS // len(rows))):
            kept = (self._states, self._tokens, self._positions, self._slots)
            write_draft_kv(
                self._runner, *(ring[columns].index_select(1, rows).flatten(0, 1) for ring in kept)
            )

    def _on_device(self, values: list[int]) -> Any:
        """Return row numbers on the device, without waiting for what runs there."""
        import torch
        from sglang.srt.utils import is_pin_memory_available

        device = self._slots.device
        pinned = torch.tensor(values, pin_memory=is_pin_memory_available(device.type))
        return pinned.to(device, non_blocking=True)


def release_kv_cache(
    original: Callable[..., Any], req: Any, tree_cache: Any, is_insert: bool = True
) -> Any:
    """Note a request whose slots enter the prefix cache: a later request does not compute their
    draft KV again (common.py:566-583).
    """
    pool = tree_cache.req_to_token_pool
    sync: DraftSync | None = getattr(pool, "spec_switch_sync", None)
    cached = is_insert and not tree_cache.disable and req.req_pool_idx is not None
    if sync is not None and cached:
        sync.ended(req.req_pool_idx)
    return original(req, tree_cache, is_insert)


def store_last_tokens(futures: Any, future_indices: Any, batch_result: Any) -> None:
    """Store of an OFF step's outcome what the next step cannot do without: neither candidates nor
    hidden states exist (overlap_utils.py:177-206).
    """
    rows, following = future_indices.interval, batch_result.next_draft_input
    futures.bonus_tokens_buf[rows] = following.bonus_tokens
    futures.new_seq_lens_buf[rows] = following.new_seq_lens
