"""`crossover demo` as a user runs it: real processes, a few seconds of load."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.children import ChildError
from loadtest.demo import main
from loadtest.rig import Rig
from loadtest.scenarios import SCENARIOS
from router.core.types import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

COMMAND = [sys.executable, "-m", "router", "demo"]
LINUX = Path("/proc/self/environ").exists()


def marked(mark: str) -> list[int]:
    """Return the processes that have inherited the mark, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@contextmanager
def demo(tmp_path: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the demo, its output in pipes and a mark in its processes' environment."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*COMMAND, "--seconds", "8", "--out", str(tmp_path / "out"), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TEST_MARK": mark, "CROSSOVER_POLICY": "no such policy"},
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.communicate()


def check_run(run: dict[str, Any]) -> None:
    assert run["tokens"] > 0
    assert run["requests"] >= 10
    assert run["errors"] == 0
    assert run["tok_s"] > 0
    for latency in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= run[latency]["p50"] <= run[latency]["p99"]
    assert sum(run["requests_by_server"].values()) <= run["requests"]
    assert 60 <= max(run["timeline"]["wanted"]) <= 64
    assert run["cpu_s"]["client"] > 0


def test_the_demo_runs_four_policies_and_leaves_no_process(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", "-") as (process, mark):
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert not LINUX or marked(mark) == []
    found = json.loads(stdout)
    assert found["schema"] == 1
    runs = found["runs"]
    assert list(runs) == ["spec-only", "base-only", "least-inflight", "routed"]
    for run in runs.values():
        check_run(run)
    assert list(runs["spec-only"]["requests_by_server"]) == ["spec"]
    assert list(runs["base-only"]["requests_by_server"]) == ["base"]
    assert set(runs["routed"]["requests_by_server"]) == {"spec", "base"}
    assert [runs[name]["switches"] for name in ("spec-only", "base-only")] == [0, 0]
    assert runs["routed"]["switches"] >= 1
    assert runs["routed"]["policy"] == "split"
    assert found["provenance"]["engines"] == ["h200-tree-v1", "h200-plain"]
    assert found["verdict"] in stderr
    assert "Run 4 of 4: routed" in stderr
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "demo.svg").stat().st_size > 10_000


@pytest.mark.skipif(not LINUX, reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_takes_its_processes_along(
    number: signal.Signals, tmp_path: Path
) -> None:
    with demo(tmp_path) as (process, mark):
        assert process.stdout is not None
        for line in process.stdout:
            if "in flight" in line:
                break
        assert len(marked(mark)) >= 3
        process.send_signal(number)
        _, stderr = process.communicate()
        assert process.returncode == 130
        assert stderr == "crossover demo: stopped\n"
        assert marked(mark) == []


def test_shared_gpus_are_shown_with_one_mode_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    shared = ("--seconds", "4", "--layout", "shared", "--json", str(path))
    with demo(tmp_path, *shared) as (process, _):
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
    found = json.loads(path.read_text())
    assert found["scenario"]["layout"] == "shared"
    assert found["runs"]["routed"]["policy"] == "threshold"
    assert "share one set of GPUs" in stdout
    assert "routed is the policy threshold: all to spec up to 8 in flight" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "moon"], "invalid choice: 'moon'"),
        (["--seconds", "1"], "must be 4 to 3600"),
        (["--seconds", "soon"], "invalid"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unwritable_output_is_known_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err


async def test_a_router_that_does_not_start_is_reported_with_its_words(tmp_path: Path) -> None:
    async with Rig(SCENARIOS["h200-tree"], Layout.DISJOINT, tmp_path, seed=1) as rig:
        with pytest.raises(ChildError, match=r"(?s)the router ended with code 2.*no-such-policy"):
            async with rig.router("test", "no-such-policy", 8):
                pass
        assert await rig.slipped_s() >= 0.0
        await rig.idle()
