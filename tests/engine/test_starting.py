"""How a start ends: with the flags in the environment, or with one line that says why not."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.harness.laboratory import engine_environment, finished
from tests.engine.harness.scenario import PLAIN, TREE, Engine
from tests.engine.harness.serving import start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PATIENCE_S = 120.0
DISABLE = "--speculative-disable-batch-threshold"
ENABLE = "--speculative-enable-batch-threshold"
DWELL = "--speculative-switch-dwell-steps"
POLICY = "--speculative-switch-policy"
PREFIX = "SGLANG_SPEC_SWITCH_"
EAGLE = {
    "--speculative-algorithm": "EAGLE3",
    "--speculative-num-steps": "3",
    "--speculative-eagle-topk": "1",
    "--speculative-num-draft-tokens": "4",
}
ARMED = (DISABLE, "4")

REFUSED = {
    "--enable-lora": (*ARMED, "--enable-lora", "--max-lora-rank", "8"),
    "--pipeline-parallel-size": (*ARMED, "--pp-size", "2"),
    "--enable-dp-attention": (*ARMED, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    "--disaggregation-mode prefill": (*ARMED, "--disaggregation-mode", "prefill"),
    "--disaggregation-mode decode": (*ARMED, "--disaggregation-mode", "decode"),
    "--speculative-adaptive": (*ARMED, "--speculative-adaptive"),
    "--enable-two-batch-overlap": (*ARMED, "--enable-two-batch-overlap"),
    "--enable-pdmux": (*ARMED, "--enable-pdmux"),
    "--enable-multi-layer-eagle": (*ARMED, "--enable-multi-layer-eagle"),
    "--attention-context-parallel-size": (*ARMED, "--tp-size", "2", "--attn-cp-size", "2"),
    "--speculative-algorithm STANDALONE": (*ARMED, "--speculative-algorithm", "STANDALONE"),
}
UNUSABLE: Sequence[tuple[tuple[str, ...], dict[str, str], str]] = (
    ((DISABLE, "-1"), {}, f"{DISABLE} must be a whole number of 0 or more, not '-1'"),
    ((DISABLE, "five"), {}, f"{DISABLE} must be a whole number of 0 or more, not 'five'"),
    ((DISABLE, ""), {}, f"{DISABLE} is empty"),
    ((*ARMED, DWELL, ""), {}, f"{DWELL} is empty"),
    ((*ARMED, ENABLE, "5"), {}, f"{ENABLE} 5 exceeds {DISABLE} 4"),
    ((*ARMED, ENABLE, "0"), {}, "would never switch speculation on again"),
    ((ENABLE, "3"), {}, f"{ENABLE} has no effect without {DISABLE}"),
    (ARMED, {"ENABLE_BATCH_THRESHOLD": "9"}, f"{ENABLE} 9 exceeds {DISABLE} 4"),
    ((*ARMED, POLICY, "goodput"), {}, f"{DISABLE} belongs to {POLICY} threshold"),
    ((POLICY, "fastest"), {}, f"{POLICY} must be threshold or goodput, not 'fastest'"),
    (ARMED, {"OPTIONAL": "maybe"}, "--speculative-switch-optional must be 1 or 0"),
    ((), {"DISABLE_BATCH_THRESHOLD": "x"}, f"{DISABLE} must be a whole number"),
)
ACCEPTED: Sequence[tuple[tuple[str, ...], dict[str, str], dict[str, str]]] = (
    ((), {}, {}),
    (("--speculative-switch-optional",), {}, {"OPTIONAL": "1"}),
    ((DISABLE, "0"), {}, {"DISABLE_BATCH_THRESHOLD": "0"}),
    ((POLICY, "goodput"), {}, {"POLICY": "goodput"}),
    (ARMED, {"DISABLE_BATCH_THRESHOLD": "90"}, {"DISABLE_BATCH_THRESHOLD": "4"}),
    (
        (*ARMED, "--speculative-switch-optional", "--pp-size", "2"),
        {},
        {"DISABLE_BATCH_THRESHOLD": "4", "OPTIONAL": "1"},
    ),
)
TRIALS = [
    *((flags, {}) for flags in REFUSED.values()),
    *((flags, environment) for flags, environment, _ in (*UNUSABLE, *ACCEPTED)),
]


@pytest.fixture(scope="module")
def outcomes(models: Path) -> list[dict[str, Any]]:
    """Every trial, in one process: it takes seconds to import SGLang."""
    model = {
        "--model-path": models / "target",
        "--speculative-draft-model-path": models / "draft",
        "--device": "cpu",
        "--attention-backend": "triton",
    }
    common = [str(word) for flag in {**model, **EAGLE}.items() for word in flag]
    trials = [
        ([*common, *flags], {PREFIX + name: value for name, value in environment.items()})
        for flags, environment in TRIALS
    ]
    text = _run([sys.executable, "-m", "tests.engine.harness.starting", json.dumps(trials)])
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"status"')]


def outcome(
    outcomes: list[dict[str, Any]], flags: tuple[str, ...], environment: dict[str, str]
) -> dict[str, Any]:
    return outcomes[TRIALS.index((flags, environment))]


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_switch_ends_the_launcher_in_one_line(
    named: str, outcomes: list[dict[str, Any]]
) -> None:
    end = outcome(outcomes, REFUSED[named], {})
    assert end["status"] == 2
    (line,) = end["told"]
    assert f"{DISABLE} cannot be used with {named}: " in line
    assert "--speculative-switch-optional" in line


@pytest.mark.parametrize(("flags", "environment", "said"), UNUSABLE)
def test_settings_that_cannot_be_used_end_the_launcher_in_one_line(
    flags: tuple[str, ...],
    environment: dict[str, str],
    said: str,
    outcomes: list[dict[str, Any]],
) -> None:
    end = outcome(outcomes, flags, environment)
    assert end["status"] == 2
    (line,) = end["told"]
    assert said in line


@pytest.mark.parametrize(("flags", "environment", "inherited"), ACCEPTED)
def test_schedulers_inherit_the_flags_which_beat_the_environment(
    flags: tuple[str, ...],
    environment: dict[str, str],
    inherited: dict[str, str],
    outcomes: list[dict[str, Any]],
) -> None:
    end = outcome(outcomes, flags, environment)
    assert (end["status"], end["told"]) == (None, [])
    assert end["inherited"] == inherited


def test_the_comparison_with_the_installed_sglang_is_a_command() -> None:
    text = _run([sys.executable, "-m", "sglang_patch.compat"])
    assert text.splitlines()[-1] == "All names agree."
    assert "MISMATCH" not in text


ENGINE = """
import os, sys
import sglang
if __name__ == "__main__":
    sglang.Engine(model_path=sys.argv[1], device="cpu", attention_backend="triton")
"""


def test_an_engine_that_parses_no_flags_is_refused_as_well(models: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(models / "target")]
    ran = finished(command, PATIENCE_S, {f"{PREFIX}DISABLE_BATCH_THRESHOLD": "4"})
    assert ran.returncode == 2
    assert f"{DISABLE} cannot be used with no --speculative-algorithm" in ran.stderr
    assert "Traceback" not in ran.stderr


UNKNOWN_WORKER = """
import sys
def register():
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang_patch.adapters import scheduler
        scheduler.ATTACH.clear()
"""


def test_what_only_the_scheduler_sees_ends_the_launcher_without_a_trace(
    models: Path, tmp_path: Path
) -> None:
    """A worker that the plugin does not know: a second plugin lets it forget all of them."""
    (tmp_path / "forgetting.py").write_text(UNKNOWN_WORKER)
    information = tmp_path / "forgetting-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetting\nVersion: 1\n")
    entry = "[sglang.srt.plugins]\nforgetting = forgetting:register\n"
    (information / "entry_points.txt").write_text(entry)
    engine = TREE.with_options("unknown-worker", speculative_disable_batch_threshold=4)
    path = f"{tmp_path}:{engine_environment()['PYTHONPATH']}"
    status, log = _start_and_end(engine, models, tmp_path, {"PYTHONPATH": path})
    assert status == 2
    assert "cannot be used with speculative worker EAGLEWorker:" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (PLAIN, "no --speculative-algorithm"),
        (TREE.with_options("lora", enable_lora=True, max_lora_rank=8), "--enable-lora"),
    ],
    ids=["no-speculation", "lora"],
)
def test_a_real_start_is_refused(engine: Engine, told: str, models: Path, tmp_path: Path) -> None:
    refused = engine.with_options("refused", speculative_disable_batch_threshold=4)
    status, log = _start_and_end(refused, models, tmp_path, {})
    assert status == 2
    assert f"{DISABLE} cannot be used with {told}: " in log
    assert "Traceback" not in log


def test_an_optional_switch_serves_without_it_and_says_why(models: Path, tmp_path: Path) -> None:
    engine = PLAIN.with_options(
        "optional", speculative_disable_batch_threshold=4, speculative_switch_optional=True
    )
    served = start_engine(engine, models, tmp_path)
    try:
        served.wait_until_healthy()
        body = {"model": "tiny", "prompt": "once upon", "max_tokens": 4}
        reply = httpx.post(served.url + "/v1/completions", json=body, timeout=PATIENCE_S)
        state = httpx.get(served.url + "/v1/loads", timeout=PATIENCE_S).json()["loads"][0]
    finally:
        served.stop()
    assert reply.status_code == 200
    assert state["spec_switch"]["state"] == "loaded"
    assert "no --speculative-algorithm" in state["spec_switch"]["reason"]
    assert "SPECULATION SWITCH IS INERT" in served.log.read_text()


def test_a_server_without_the_flags_shows_no_switch(models: Path, tmp_path: Path) -> None:
    served = start_engine(TREE, models, tmp_path)
    try:
        served.wait_until_healthy()
        load = httpx.get(served.url + "/v1/loads", timeout=PATIENCE_S).json()["loads"][0]
        assert "spec_switch" not in load
        assert "spec_switch" not in httpx.get(served.url + "/metrics", timeout=PATIENCE_S).text
    finally:
        served.stop()


def _start_and_end(
    engine: Engine, models: Path, folder: Path, environment: dict[str, str]
) -> tuple[int, str]:
    served = start_engine(engine, models, folder, environment)
    try:
        return served.process.wait(PATIENCE_S), served.log.read_text()
    except subprocess.TimeoutExpired:
        pytest.fail("the server went on")
    finally:
        served.stop()


def _run(command: list[str]) -> str:
    ran = finished(command, PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
