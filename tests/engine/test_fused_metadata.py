"""The metadata that FlashAttention's graphs read, by one kernel instead of many: the same."""

import sys

import pytest

from tests.engine.harness.laboratory import finished

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_the_fused_metadata_are_stocks() -> None:
    """In a process of its own, since it needs the doubles of the CUDA kernels."""
    command = [sys.executable, "-m", "tests.engine.harness.metadata"]
    answer = finished(command, timeout_s=240)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.splitlines()[-1] == "4 comparisons"
