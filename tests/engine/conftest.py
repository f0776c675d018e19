"""The engine tests' shared pieces: a tiny model, and processes that run SGLang's scheduler on
it.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness.laboratory import Laboratory, engine_environment
from tests.engine.harness.scenario import Job


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the random target and its EAGLE-3 draft."""
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "cpu_engine.models", str(folder)]
    subprocess.run(command, check=True, env=engine_environment(), timeout=120)
    return folder


@pytest.fixture(scope="session")
def laboratory(
    models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Laboratory]:
    """Runs engine jobs; begins with those that the collected tests are parametrized with, in
    their order.
    """
    with Laboratory(models, tmp_path_factory.mktemp("workers")) as laboratory:
        for item in request.session.items:
            for job in item.callspec.params.values() if hasattr(item, "callspec") else ():
                if isinstance(job, Job):
                    laboratory.begin(job)
        yield laboratory
