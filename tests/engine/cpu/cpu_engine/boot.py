"""What must differ on a CPU, as a table: module of SGLang -> what to do before and after its
import.
"""

import os
import sys
import types
from collections.abc import Callable

from cpu_engine.importing import PatchingFinder

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # Triton kernels run in its interpreter: no GPU driver needed
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile would spend half a minute in g++
}


def prepare() -> None:
    """Set the environment and register the patches; imports nothing of SGLang or torch."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(isinstance(finder, PatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PatchingFinder(BEFORE, AFTER))


TORCHVISION = {
    "torchvision": (),
    "torchvision.io": ("decode_jpeg",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("InterpolationMode",),
}


def offer_torchvision() -> None:
    """Two modules import image functions that text never needs."""
    for name, attributes in TORCHVISION.items():
        module = types.ModuleType(name)
        module.__path__ = []
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules[name] = module


def withdraw_torchvision(_: types.ModuleType) -> None:
    """Transformers must not see the stand-in: it would import more of it."""
    for name in TORCHVISION:
        sys.modules.pop(name, None)


def skip_image_processors(module: types.ModuleType) -> None:
    """Without torchvision, transformers' placeholder raises when configurations register with
    it.
    """
    module.register_image_processor = lambda *args, **kwargs: None


def tolerate_cuda_calls(_: types.ModuleType) -> None:
    """Two calls that SGLang makes on every device, and that torch refuses without CUDA."""
    import torch

    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.Tensor.record_stream = lambda self, stream: None


def use_tree_ops(module: types.ModuleType) -> None:
    import sgl_kernel

    module.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient
    module._is_cuda = True  # verify_tree_greedy_func has no CPU branch


def use_sampling_ops(module: types.ModuleType) -> None:
    import sgl_kernel

    module.TREE_SPEC_KERNEL_AVAILABLE = True  # else temperature > 0 would verify greedily
    for name in ("top_k_renorm_prob", "top_p_renorm_prob", "tree_speculative_sampling_target_only"):
        setattr(module, name, getattr(sgl_kernel, name))


def use_sampling_and_cache_ops(module: types.ModuleType) -> None:
    use_sampling_ops(module)
    use_torch_index_kernels(module)
    module._is_cuda = True  # assign_extend_cache_locs_func has no CPU branch


def apply_grammar_masks(module: types.ModuleType) -> None:
    """SGLang has a torch version of this, which it uses for one other device only."""
    module.XGrammarGrammar.apply_vocab_mask = lambda self, logits, vocab_mask: (
        module.apply_token_bitmask_inplace_torch(logits, vocab_mask)
    )


def use_torch_decode_attention(module: types.ModuleType) -> None:
    from cpu_engine import attention

    module.decode_attention_fwd = attention.decode_attention_fwd


def use_torch_extend_attention(module: types.ModuleType) -> None:
    from cpu_engine import attention

    module.extend_attention_fwd = attention.extend_attention_fwd


def use_torch_index_kernels(module: types.ModuleType) -> None:
    from cpu_engine import index_kernels

    index_kernels.replace_in(module)


BEFORE: dict[str, Callable[[], None]] = {
    "sglang.srt.utils.common": offer_torchvision,
    "sglang.srt.multimodal.internvl_utils": offer_torchvision,
}

AFTER: dict[str, Callable[[types.ModuleType], None]] = {
    "sglang.srt.utils.common": withdraw_torchvision,
    "sglang.srt.multimodal.internvl_utils": withdraw_torchvision,
    "sglang.srt.configs.utils": skip_image_processors,
    "sglang.srt.managers.scheduler": tolerate_cuda_calls,
    "sglang.srt.speculative.eagle_utils": use_tree_ops,
    "sglang.srt.speculative.eagle_info": use_sampling_ops,
    "sglang.srt.speculative.eagle_info_v2": use_sampling_and_cache_ops,
    "sglang.srt.constrained.xgrammar_backend": apply_grammar_masks,
    "sglang.srt.layers.attention.triton_ops.decode_attention": use_torch_decode_attention,
    "sglang.srt.layers.attention.triton_ops.extend_attention": use_torch_extend_attention,
    "sglang.srt.layers.attention.utils": use_torch_index_kernels,
    "sglang.srt.model_executor.forward_batch_info": use_torch_index_kernels,
    "sglang.srt.speculative.spec_utils": use_torch_index_kernels,
}
