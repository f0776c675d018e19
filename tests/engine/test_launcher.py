"""What deploy's launcher asks of SGLang, the real SGLang understands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness.laboratory import engine_environment

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
# A node with everything set, the flags of the Blackwell override included.
FUSED = re.findall(r"--enable-\S+", (ROOT / "deploy/compose/rtx-pro-6000.yml").read_text())
NODE = {
    "LAYOUT": "disjoint",
    "MODEL": "/models/target",
    "DRAFT_MODEL": "/models/draft",
    "SERVED_MODEL_NAME": "m",
    "CONTEXT_LENGTH": "4096",
    "ATTENTION_BACKEND": "flashinfer",
    "ENGINE_ARGS": " ".join(FUSED),
}
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
known, unknown = parser.parse_known_args(sys.argv[1:])
names = ("tensor_parallel_size", "max_running_requests", "speculative_algorithm",
         "enable_flashinfer_allreduce_fusion", "enable_torch_symm_mem")
print(json.dumps({**{name: getattr(known, name) for name in names}, "unknown": unknown}))
"""


@pytest.mark.parametrize(("role", "algorithm"), [("spec", "EAGLE3"), ("base", None)])
def test_the_real_server_takes_every_flag_of_the_launcher(role: str, algorithm: str | None) -> None:
    launcher = [sys.executable, str(ROOT / "deploy/docker/launch_engine.py"), "--print", role]
    words = shlex.split(_run(launcher, NODE))
    flags = words[words.index("sglang.launch_server") + 1 :]
    assert json.loads(_run([sys.executable, "-c", PARSE, *flags], {})) == {
        "tensor_parallel_size": 4,
        "max_running_requests": 256,
        "speculative_algorithm": algorithm,
        "enable_flashinfer_allreduce_fusion": True,
        "enable_torch_symm_mem": True,
        "unknown": [],
    }


def _run(command: list[str], more: dict[str, str]) -> str:
    environment = {**engine_environment(), **more}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]
