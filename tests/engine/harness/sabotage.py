"""Ways to break the engine or the plugin, by name: a check that passes them all checks nothing."""

from collections.abc import Callable
from functools import partial

DROP_HOOK = "drop-hook:"
VOID_HOOK = "void-hook:"


def apply_sabotage(names: str) -> None:
    """Break this process in each way named, joined by "+"; called before plugins are loaded."""
    for name in names.split("+"):
        _apply(name)


def _apply(name: str) -> None:
    if name.startswith(DROP_HOOK):
        drop_hook(name.removeprefix(DROP_HOOK))
    elif name.startswith(VOID_HOOK):
        void_hook(name.removeprefix(VOID_HOOK))
    else:
        SABOTAGE[name]()


def drop_hook(target: str) -> None:
    """Lose one of the plugin's hooks, as SGLang does when it fails to apply one: it logs that and
    goes on.
    """
    _change_registration(target, None)


def void_hook(target: str) -> None:
    """Leave one of the plugin's hooks in place, and nothing in it."""
    _change_registration(target, lambda original, *args, **kwargs: original(*args, **kwargs))


def _change_registration(target: str, hook: Callable[..., object] | None) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    register = HookRegistry.register

    def register_changed(name, given, *args, **kwargs):
        if name != target:
            register(name, given, *args, **kwargs)
        elif hook is not None:
            register(name, hook, *args, **kwargs)

    HookRegistry.register = register_changed


def leak_kv_slot() -> None:
    """The fifth release of KV slots forgets one of them."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    free, calls = TokenToKVPoolAllocator.free, [0]

    def forgetful(self, slots):
        calls[0] += len(slots) > 0
        free(self, slots[:-1] if calls[0] == 5 and len(slots) else slots)

    TokenToKVPoolAllocator.free = forgetful


def accept_any_child() -> None:
    """Greedy verification accepts the first child whatever the target says."""
    import sgl_kernel

    verify = sgl_kernel.verify_tree_greedy

    def credulous(*, candidates, target_predict, retrive_next_token, **others):
        target_predict = target_predict.clone().view(candidates.shape)
        for row, child in enumerate(retrive_next_token[:, 0].tolist()):
            if child != -1:
                target_predict[row, 0] = candidates[row, child]
        verify(
            candidates=candidates,
            target_predict=target_predict,
            retrive_next_token=retrive_next_token,
            **others,
        )

    sgl_kernel.verify_tree_greedy = credulous


def sample_any_child() -> None:
    """Sampling verification accepts the first child whatever its probability."""
    from sglang.srt.speculative import eagle_info, eagle_info_v2

    verify = eagle_info.tree_speculative_sampling_target_only

    def credulous(*, uniform_samples, **others):
        verify(uniform_samples=uniform_samples * 0, **others)

    for module in (eagle_info, eagle_info_v2):
        module.tree_speculative_sampling_target_only = credulous


def show_whole_tree() -> None:
    """Every node of the tree attends to every other."""
    from sglang.srt.speculative import eagle_utils

    build = eagle_utils.sgl_build_tree_kernel_efficient

    def unmasked(parent_list, selected_index, verified_seq_len, tree_mask, *others):
        build(parent_list, selected_index, verified_seq_len, tree_mask, *others)
        tree_mask.fill_(True)

    eagle_utils.sgl_build_tree_kernel_efficient = unmasked


def forget_draft_hidden_states(worker: str, method: str) -> None:
    """The draft extend after a decode step sees zeros instead of the target's hidden states."""
    import importlib

    module, name = worker.rsplit(".", 1)
    owner = getattr(importlib.import_module(module), name)
    extend = getattr(owner, method)

    def blind(self, batch, *others):
        batch.spec_info.hidden_states = batch.spec_info.hidden_states * 0
        return extend(self, batch, *others)

    setattr(owner, method, blind)


def refuse_verify_waits() -> None:
    """The scheduler of v2 may not wait for a verification: it fails instead."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    def refuse(self):
        if self.is_spec_v2 and self.spec_info.verify_done is not None:
            raise RuntimeError("waits for a verification")

    ScheduleBatch.maybe_wait_verify_done = refuse


def lose_from_deferred_sync(method: str) -> None:
    """One method of the deferred draft sync does nothing."""
    from sglang_patch.adapters.draft_sync import DraftSync

    setattr(DraftSync, method, lambda self, *args: None)


SABOTAGE: dict[str, Callable[[], None]] = {
    "leak-kv-slot": leak_kv_slot,
    "accept-any-child": accept_any_child,
    "sample-any-child": sample_any_child,
    "show-whole-tree": show_whole_tree,
    "refuse-verify-waits": refuse_verify_waits,
    "never-write-owed-kv": partial(lose_from_deferred_sync, "_write"),
    "keep-no-prompts": partial(lose_from_deferred_sync, "keep_prompts"),
    "blind-draft": partial(
        forget_draft_hidden_states,
        "sglang.srt.speculative.eagle_worker.EAGLEWorker",
        "forward_draft_extend_after_decode",
    ),
}
