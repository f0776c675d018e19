"""The engine container's launcher: the command that it prints, and what it refuses."""

import subprocess
import sys

import pytest

from tests.deploy.compose import ROOT, example_environment

LAUNCHER = ROOT / "deploy/docker/launch_engine.py"


def launch(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**example_environment(), "LAYOUT": "disjoint", **changes}
    return subprocess.run(
        [sys.executable, str(LAUNCHER), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def printed(role: str, **changes: str) -> str:
    ran = launch("--print", role, **changes)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_only_the_spec_server_speculates() -> None:
    assert "--speculative-algorithm EAGLE3" in printed("spec")
    assert "--speculative" not in printed("base")


@pytest.mark.parametrize(("word", "shape"), [("tree", (2, 4, 16)), ("chain", (3, 1, 4))])
def test_the_draft_has_the_shape_that_was_asked_for(word: str, shape: tuple[int, ...]) -> None:
    steps, topk, tokens = shape
    assert (
        f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {tokens}"
    ) in printed("spec", SPECULATION=word)


@pytest.mark.parametrize("role", ["spec", "base"])
def test_both_servers_may_run_the_same_number_of_requests(role: str) -> None:
    assert "--max-running-requests 96" in printed(role, MAX_RUNNING_REQUESTS="96")


def test_disjoint_servers_have_gpus_of_their_own() -> None:
    assert printed("spec").startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 ")
    assert printed("base").startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ")
    assert "--tp-size 4" in printed("base")


def test_shared_servers_have_all_gpus_and_less_than_half_of_their_memory_each() -> None:
    for role in ("spec", "base"):
        line = printed(role, LAYOUT="shared")
        assert line.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ")
        assert "--tp-size 8" in line
        assert float(line.split("--mem-fraction-static ")[1].split()[0]) < 0.5


def test_the_switch_is_only_set_where_it_was_asked_for() -> None:
    assert "batch-threshold" not in printed("spec")
    assert "--speculative-disable-batch-threshold 90" in printed("spec", OFF_ABOVE="90")


def test_more_flags_go_to_the_engine_as_they_are() -> None:
    assert "--json-model-override-args '{\"a\": 1}'" in printed(
        "base", ENGINE_ARGS="--json-model-override-args '{\"a\": 1}'"
    )


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("LAYOUT", "both", "shared or disjoint"),
        ("LAYOUT", "", "shared or disjoint"),
        ("MODEL", "", "a path below /models"),
        ("DRAFT_MODEL", "", "a path below /models"),
        ("SPECULATION", "bush", "tree or chain"),
        ("SPEC_GPUS", "0,0", "different GPU indices"),
        ("SPEC_GPUS", "a", "different GPU indices"),
        ("SPEC_MEM_FRACTION", "1.5", "a number from 0.05 to 0.98"),
        ("MAX_RUNNING_REQUESTS", "many", "a number from 1 to 65536"),
        ("OFF_ABOVE", "-1", "a number from 1 to 65536"),
        ("ENGINE_ARGS", "--a 'b", "quotation"),
    ],
)
def test_what_is_wrong_is_told_with_its_name_and_what_is_allowed(
    variable: str, value: str, allowed: str
) -> None:
    ran = launch("spec", **{variable: value})
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert variable in line
    assert allowed in line


def test_a_role_must_be_named() -> None:
    ran = launch()
    assert ran.returncode == 2
    assert "spec|base" in ran.stderr
