"""Runs jobs on two workers at a time, each job once; the tests ask for their results."""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from tests.engine.harness.scenario import CaseResult, Job

ROOT = Path(__file__).parents[3]
CPU_ENGINE = ROOT / "tests/engine/cpu"
WORKERS = 2


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


class CaseError(Exception):
    """A case ended in an exception inside the engine; the text is its traceback."""


class Laboratory:
    """Worker processes and the answers to the jobs given to them so far."""

    def __init__(self, models: Path, logs: Path) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(WORKERS)
        self._answers: dict[str, Future[list[list[dict]]]] = {}
        self._workers = [self._start(models, logs / f"worker-{i}.log") for i in range(WORKERS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def _start(self, models: Path, log: Path) -> "subprocess.Popen[str]":
        with log.open("w") as stderr:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.harness.worker", str(models)],
                cwd=ROOT,
                env=engine_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._idle.put(worker)
        return worker

    def begin(self, job: Job) -> Future[list[list[dict]]]:
        """Start the job, or find it started."""
        line = json.dumps(job.dump())
        if line not in self._answers:
            self._answers[line] = self._threads.submit(self._ask, line)
        return self._answers[line]

    def _ask(self, line: str) -> list[list[dict]]:
        worker = self._idle.get()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        finally:
            self._idle.put(worker)
        if not answer:
            raise CaseError(f"the worker ended with status {worker.wait()}")
        return json.loads(answer)

    def result(self, job: Job, case_name: str, rank: int = 0) -> CaseResult:
        """Wait for one case of a job; raise CaseError if it failed inside the engine."""
        for case, answer in zip(job.cases, self.begin(job).result()[rank], strict=True):
            if case.name == case_name:
                if "error" in answer:
                    raise CaseError(answer["error"])
                return CaseResult.load(answer["result"])
        raise KeyError(case_name)
