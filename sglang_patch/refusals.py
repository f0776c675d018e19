"""What the switch cannot work with: each refusal names the setting, the reason and the way out."""

import logging
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang_patch.config import DRAFT_SYNC, EACH_STEP, OPTIONAL

logger = logging.getLogger(__name__)

EXIT_CODE = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing in the way."""

    what: str
    why: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.way_out}."


def server_refusals(arguments: Any) -> tuple[Refusal, ...]:
    """Return what in the server's arguments the switch cannot work with."""
    algorithm = arguments.speculative_algorithm
    if algorithm not in ("EAGLE", "EAGLE3"):
        return (
            Refusal(
                f"--speculative-algorithm {algorithm}"
                if algorithm
                else "no --speculative-algorithm",
                "only EAGLE and EAGLE3 can be switched",
                "Use one of them, or remove the switch's settings",
            ),
        )
    checks = (
        (
            arguments.enable_dp_attention,
            "--enable-dp-attention",
            "its ranks run batches of different sizes and would choose different modes",
        ),
        (
            arguments.enable_lora or arguments.lora_paths,
            "--enable-lora",
            "a second CUDA graph set would reset its batch buffers",
        ),
        (
            arguments.pp_size > 1,
            "--pipeline-parallel-size",
            "pipeline stages do not share the decision",
        ),
        (
            arguments.disaggregation_mode != "null",
            f"--disaggregation-mode {arguments.disaggregation_mode}",
            "the other node would not know the mode",
        ),
        (
            arguments.speculative_adaptive,
            "--speculative-adaptive",
            "both would change the draft length",
        ),
        (
            arguments.enable_multi_layer_eagle,
            "--enable-multi-layer-eagle",
            "its worker has draft states of its own",
        ),
        (
            arguments.enable_two_batch_overlap,
            "--enable-two-batch-overlap",
            "it splits batches in two",
        ),
        (
            arguments.enable_pdmux,
            "--enable-pdmux",
            "it keeps one attention backend per stream group",
        ),
        (arguments.attn_cp_size > 1, "--attention-context-parallel-size", "it is untested"),
        (
            arguments.device not in ("cuda", "cpu"),
            f"--device {arguments.device}",
            "only CUDA (and the CPU, for tests) are known",
        ),
    )
    return tuple(
        Refusal(what, why, "Remove it, or the switch's settings")
        for bad, what, why in checks
        if bad
    )


def hybrid_refusal(model_runner: Any) -> tuple[Refusal, ...]:
    """Return a refusal for models that keep more than one kind of state per token."""
    if model_runner.mambaish_config is None and not model_runner.is_hybrid_swa:
        return ()
    return (
        Refusal(
            "this model",
            "its Mamba, linear-attention or sliding-window layers are untested",
            "Serve it without the switch's settings",
        ),
    )


def worker_refusal(name: str, known: Container[str]) -> tuple[Refusal, ...]:
    """Return a refusal for a speculative worker that the plugin does not know."""
    if name in known:
        return ()
    return (
        Refusal(
            f"speculative worker {name}",
            "only EAGLEWorker and EAGLEWorkerV2 are known",
            "Use --speculative-algorithm EAGLE3, or remove the switch's settings",
        ),
    )


def sync_refusal(worker: str, draft_lacks: str | None) -> tuple[Refusal, ...]:
    """Return a refusal to defer the draft sync: of another worker, or of a draft whose KV cannot be
    written by itself (`draft_lacks` says why).
    """
    way_out = f"Use {DRAFT_SYNC.flag} {EACH_STEP}"
    if worker != "EAGLEWorkerV2":
        why = "only EAGLEWorkerV2 (a chain, with overlap scheduling) defers it"
        return (Refusal(f"speculative worker {worker}", why, way_out),)
    if draft_lacks is not None:
        return (Refusal("this draft model", draft_lacks, way_out),)
    return ()


def hook_refusal(unapplied: Sequence[str]) -> tuple[Refusal, ...]:
    """Return a refusal if hooks did not take effect: SGLang itself only logs that."""
    if not unapplied:
        return ()
    return (
        Refusal(
            "this process",
            f"SGLang did not apply the hooks on {', '.join(unapplied)}",
            "Look for 'Failed to apply hooks' above, or remove the switch's settings",
        ),
    )


class RefusedError(SystemExit):
    """Ends the process. SGLang swallows what plugins raise (plugins/__init__.py:132), not this."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE


def stop(message: str) -> NoReturn:
    """Say why, in one line on stderr, and end the process."""
    print(f"speculation switch: {message}", file=sys.stderr, flush=True)
    raise RefusedError(message)


def refuse(refusals: Sequence[Refusal], *, asked_by: str, optional: bool) -> str:
    """End the process with one message, or, where that is allowed, warn and return the reason."""
    reason = " ".join(str(refusal) for refusal in refusals)
    if optional:
        logger.warning("SPECULATION SWITCH IS INERT: %s cannot be used with %s", asked_by, reason)
        return reason
    stop(f"{asked_by} cannot be used with {reason} Or add {OPTIONAL.flag} to start without it.")
