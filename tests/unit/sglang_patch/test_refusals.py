import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patch.refusals import (
    RefusedError,
    hook_refusal,
    hybrid_refusal,
    refuse,
    server_refusals,
    worker_refusal,
)
from tests.unit.sglang_patch.server_arguments import plain_arguments as arguments


def test_a_plain_eagle_server_is_not_refused() -> None:
    assert server_refusals(arguments()) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_algorithm": None}, "no --speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"lora_paths": ["adapter"]}, "--enable-lora"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"attn_cp_size": 2}, "--attention-context-parallel-size"),
        ({"pp_size": 2}, "--pipeline-parallel-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"device": "npu"}, "--device npu"),
    ],
)
def test_what_cannot_be_switched_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    (refusal,) = server_refusals(arguments(**changes))
    assert str(refusal).startswith(named)
    assert refusal.why
    assert refusal.way_out


def test_everything_in_the_way_is_said_at_once() -> None:
    refusals = server_refusals(arguments(enable_dp_attention=True, pp_size=2))
    assert len(refusals) == 2


def test_models_with_other_states_are_refused() -> None:
    plain = SimpleNamespace(mambaish_config=None, is_hybrid_swa=False)
    assert hybrid_refusal(plain) == ()
    assert hybrid_refusal(SimpleNamespace(mambaish_config=object(), is_hybrid_swa=False))
    assert hybrid_refusal(SimpleNamespace(mambaish_config=None, is_hybrid_swa=True))


def test_unknown_workers_and_hooks_that_did_not_apply_are_refused() -> None:
    assert worker_refusal("EAGLEWorker", known={"EAGLEWorker"}) == ()
    assert "NewWorker" in str(worker_refusal("NewWorker", known={"EAGLEWorker"})[0])
    assert hook_refusal(()) == ()
    assert "a.b.c" in str(hook_refusal(("a.b.c",))[0])


def test_a_refusal_ends_the_process_with_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        refuse(server_refusals(arguments(pp_size=2)), asked_by="--the-flag", optional=False)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--the-flag cannot be used with --pipeline-parallel-size" in said
    assert "--speculative-switch-optional" in said


def test_an_optional_switch_warns_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reason = refuse(server_refusals(arguments(pp_size=2)), asked_by="--flag", optional=True)
    assert "--pipeline-parallel-size" in reason
    assert "INERT" in caplog.text
