from pathlib import Path

import pytest

from sglang_patch import compat
from sglang_patch.compat import TESTED_VERSIONS, Installed, problems, report
from sglang_patch.hooks import TABLE, Hook, Kind, Role

SOURCE = """
from engine.other import *

class Worker(Base):
    steps: int = 0
    topk: int

    def forward(self, batch, *, mode=None):
        return batch
"""
OTHER = "async def available(device, gpu_id): ...\n"


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "worker.py").write_text(SOURCE)
    (package / "other.py").write_text(OTHER)
    return Installed(TESTED_VERSIONS[0], tmp_path)


def row(target: str, parameters: str, kind: Kind = Kind.HOOK) -> Hook:
    return Hook(target, tuple(parameters.split()), Role.SCHEDULER, "why", kind=kind)


@pytest.mark.parametrize(
    "agreeing",
    [
        row("engine.worker:Worker.forward", "self batch mode"),
        row("engine.worker:Worker.forward", "batch", Kind.CALL),
        row("engine.worker:Worker", "topk steps", Kind.FIELDS),
        row("engine.worker:available", "device", Kind.CALL),
    ],
)
def test_names_that_agree_are_no_problem(installed: Installed, agreeing: Hook) -> None:
    assert problems(installed, [agreeing]) == ()


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        (row("engine.gone:Worker.forward", "self batch"), "no module engine.gone"),
        (row("engine.worker:Worker.verify", "self batch"), "Worker.verify: not defined"),
        (row("engine.worker:Nobody.forward", "self batch"), "Nobody.forward: not defined"),
        (row("engine.worker:Worker.forward", "self batch"), r"has (self, batch, mode), not (self,"),
        (row("engine.worker:Worker.forward", "rank", Kind.CALL), "not (rank)"),
        (row("engine.worker:Worker", "hidden_states", Kind.FIELDS), "not (hidden_states)"),
        (row("engine.worker:Worker", "self"), "is a class"),
    ],
)
def test_a_mismatch_names_the_hook_and_the_difference(
    installed: Installed, differing: Hook, said: str
) -> None:
    (problem,) = problems(installed, [differing])
    assert said in problem
    text = report(installed, [differing])
    assert "MISMATCH" in text
    assert problem in text


def test_an_untested_version_is_a_problem_of_its_own(installed: Installed) -> None:
    (problem,) = problems(Installed("0.6.0", installed.folder), [])
    assert "SGLang 0.6.0 is untested (tested: 0.5.12.post1)" in problem


def test_without_sglang_the_command_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "find_installed", lambda: None)
    assert compat.main() == 1
    assert "SGLang is not installed" in capsys.readouterr().out


def test_a_mismatch_fails_the_command(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of SGLang's is in that folder."""
    monkeypatch.setattr(compat, "find_installed", lambda: installed)
    assert compat.main() == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_the_table_names_no_target_twice_and_every_hook_has_its_adapter() -> None:
    targets = [hook.target for hook in TABLE]
    assert len(targets) == len(set(targets))
    adapters = Path(compat.__file__).parent / "adapters"
    for hook in TABLE:
        if hook.kind is not Kind.HOOK:
            continue
        module, _, function = (hook.adapter or "").partition(":")
        assert f"def {function}(" in (adapters / f"{module}.py").read_text(), hook.path
