"""Children are real processes here."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest import children
from loadtest.children import Child, ChildError, free_port

pytestmark = pytest.mark.anyio

READY = "print('ready', flush=True)\n"
FOREVER = READY + "import time\ntime.sleep(60)"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print('ready', child.pid, flush=True)\nchild.wait()"
)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - processes notify nobody
            await asyncio.sleep(0.01)


async def ready(log: Path) -> str:
    await eventually(lambda: "ready" in log.read_text() and log.read_text().endswith("\n"))
    return log.read_text()  # noqa: ASYNC240 - a short file


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_a_child_ends_with_its_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Child("sleeper", ["-c", FOREVER], log) as child:
        await ready(log)
        child.check()
        assert alive(child.pid)
    assert not alive(child.pid)


async def test_a_child_that_ignores_the_request_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "STOP_S", 0.2)
    log = tmp_path / "log"
    async with Child("stubborn", ["-c", STUBBORN], log) as child:
        await ready(log)
    assert not alive(child.pid)


async def test_what_a_child_started_ends_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Child("parent", ["-c", PARENT], log):
        grandchild = int((await ready(log)).split()[1])
        assert alive(grandchild)
    await eventually(lambda: not alive(grandchild))


async def test_a_child_ends_when_its_block_is_cancelled(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pids: list[int] = []

    async def block() -> None:
        async with Child("sleeper", ["-c", FOREVER], log) as child:
            pids.append(child.pid)
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await eventually(lambda: bool(pids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids[0])


async def test_a_child_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Child("failing", ["-c", "import sys; sys.exit('no such thing')"], log) as child:
        await asyncio.wait_for(child.ended(), 10)
        with pytest.raises(ChildError, match=r"failing ended with code 1:\n  no such thing"):
            child.check()


async def test_the_user_s_settings_do_not_reach_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_POLICY", "split")
    log = tmp_path / "log"
    command = "import os; print('ready', os.environ.get('CROSSOVER_POLICY'), flush=True)"
    async with Child("env", ["-c", command], log):
        assert "None" in await ready(log)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
async def test_cpu_time_of_a_child_is_known(tmp_path: Path) -> None:
    log = tmp_path / "log"
    burn = "import time\nwhile time.process_time() < 0.2: pass\n" + FOREVER
    async with Child("burner", ["-c", burn], log) as child:
        await ready(log)
        used = child.cpu_s()
    assert used is not None
    assert used >= 0.15


def test_a_free_port_can_be_bound() -> None:
    assert 0 < free_port() < 2**16
