"""Runs jobs on two workers at a time, each job once; the tests ask for their results."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from tests.engine.harness.scenario import CaseResult, Job

ROOT = Path(__file__).parents[3]
CPU_ENGINE = ROOT / "tests/engine/cpu"
WORKERS = 2
URGENT = False  # sorts before True
STOP = ""

Answer = list[list[dict[str, Any]]]


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of every process that runs SGLang: on the CPU, one thread, no settings of the
    caller's.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")
    }
    return {
        **inherited,
        "PYTHONPATH": f"{CPU_ENGINE}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **(extra or {}),
    }


def finished(
    command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command in the engine's environment, and `more` of it, to its end."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=engine_environment(more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class CaseError(Exception):
    """A case ended in an exception inside the engine; the text is its traceback."""


class Laboratory:
    """Worker processes and the answers to the jobs given to them so far.

    A job that a test waits for goes before those that were only announced.
    """

    def __init__(self, models: Path, logs: Path) -> None:
        self._pending: queue.PriorityQueue[tuple[bool, int, str]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._answers: dict[str, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._workers = [self._start(models, logs / f"worker-{i}.log") for i in range(WORKERS)]
        for worker in self._workers:
            threading.Thread(target=self._work, args=(worker,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._pending.put((URGENT, next(self._order), STOP))
            os.killpg(worker.pid, signal.SIGKILL)
            worker.communicate()

    def _start(self, models: Path, log: Path) -> "subprocess.Popen[str]":
        with log.open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.engine.harness.worker", str(models)],
                cwd=ROOT,
                env=engine_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def begin(self, job: Job, *, urgent: bool = False) -> "Future[Answer]":
        """Start the job, or find it started."""
        line = json.dumps(job.dump())
        with self._lock:
            known = line in self._answers
            future = self._answers.setdefault(line, Future())
            if not known or (urgent and not future.running()):
                self._pending.put((URGENT if urgent else not URGENT, next(self._order), line))
        return future

    def _work(self, worker: "subprocess.Popen[str]") -> None:
        while (line := self._pending.get()[-1]) != STOP:
            with self._lock:
                future = self._answers[line]
                if future.running() or future.done():
                    continue
                future.set_running_or_notify_cancel()
            try:
                future.set_result(_ask(worker, line))
            except (CaseError, OSError, ValueError) as error:
                future.set_exception(error)

    def result(self, job: Job, case_name: str, rank: int = 0) -> CaseResult:
        """Wait for one case of a job; raise CaseError if it failed inside the engine."""
        answers = self.begin(job, urgent=True).result()
        for case, answer in zip(job.cases, answers[rank], strict=True):
            if case.name == case_name:
                if "error" in answer:
                    raise CaseError(answer["error"])
                return CaseResult.load(answer["result"])
        raise KeyError(case_name)


def _ask(worker: "subprocess.Popen[str]", line: str) -> Answer:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise CaseError(f"the worker ended with status {worker.wait()}")
    return json.loads(answer)
