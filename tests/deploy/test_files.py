"""What is written in languages of its own, by their own linters."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.compose import ROOT

pytestmark = pytest.mark.deploy

SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "tests").glob("*/*.sh"))]
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


def clean(program: str, *words: str) -> None:
    ran = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing_in(path: Path) -> None:
    clean("hadolint", str(path))


def test_yamllint_finds_nothing() -> None:
    clean("yamllint", "--strict", "docker-compose.yml", "deploy", ".yamllint.yml")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in(path: Path) -> None:
    clean("shellcheck", str(path))
