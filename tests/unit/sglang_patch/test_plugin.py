"""What is registered with SGLang, in a process that finds a package of that name and shape."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_patch.compat import TESTED_VERSIONS
from sglang_patch.hooks import FLAG_HOOKS

DISABLE = "SGLANG_SPEC_SWITCH_DISABLE_BATCH_THRESHOLD"
OPTIONAL = "SGLANG_SPEC_SWITCH_OPTIONAL"
SERVER_ARGUMENTS = """
class ServerArgs:
    def add_cli_args(parser): ...
    def from_cli_args(cls, args): ...
"""
REGISTRY = """
class HookType:
    AROUND = None
class HookRegistry:
    def register(path, adapter, kind):
        print(path)
"""
REGISTER = (
    "import logging; logging.basicConfig(); from sglang_patch import plugin; plugin.register()"
)
Register = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """Register with a small SGLang that has the given server arguments and version."""

    def run(
        arguments: str = SERVER_ARGUMENTS, version: str = TESTED_VERSIONS[0], **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        files = {
            "sglang/__init__.py": "",
            "sglang/srt/server_args.py": arguments,
            "sglang/srt/plugins/hook_registry.py": REGISTRY,
            f"sglang-{version}.dist-info/METADATA": f"Name: sglang\nVersion: {version}\n",
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        root = Path(__file__).parents[3]
        return subprocess.run(
            [sys.executable, "-c", REGISTER],
            env={"PYTHONPATH": f"{tmp_path}:{root}", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_with_nothing_set_only_the_flags_are_hooked(register: Register) -> None:
    ran = register()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == [hook.path for hook in FLAG_HOOKS]


def test_flags_of_another_shape_are_left_alone(register: Register) -> None:
    """With nothing set, a server of an unknown version must still start as it would."""
    ran = register(SERVER_ARGUMENTS.replace("parser", "parser, group"), "0.9.9")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "has no flags here" in ran.stderr
    assert "has (parser, group), not (parser)" in ran.stderr


def test_an_sglang_that_differs_is_refused_in_one_line(register: Register) -> None:
    ran = register(version="0.9.9", **{DISABLE: "8"})
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "SGLang 0.9.9 is untested" in line
    assert "--speculative-switch-optional" in line


def test_an_sglang_that_differs_serves_without_an_optional_switch(register: Register) -> None:
    ran = register(version="0.9.9", **{DISABLE: "8", OPTIONAL: "1"})
    assert ran.returncode == 0
    assert ran.stdout.split() == [hook.path for hook in FLAG_HOOKS]
    assert "SPECULATION SWITCH IS INERT" in ran.stderr


def test_a_bad_value_beside_it_ends_the_process_too(register: Register) -> None:
    """SGLang swallows every exception of a plugin but an exit."""
    ran = register(version="0.9.9", **{DISABLE: "8", OPTIONAL: "maybe"})
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "--speculative-switch-optional must be 1 or 0, not 'maybe'" in line
