"""Runs jobs, each in a fork of this process, which has imported SGLang once: `python -m ...
MODELS_FOLDER`.

One JSON job a line comes in; one JSON answer a line goes out: for every case a result or the
error's text. A fork keeps what SGLang and its plugins hold per process from leaking between jobs.
Everything that SGLang prints goes to stderr.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tests.engine.harness.sabotage import apply_sabotage
from tests.engine.harness.scenario import Job
from tests.engine.harness.scheduling import Conversation, Trace, build_scheduler

PRELOADED = (  # SGLang imports these when it builds a scheduler: once here, instead of in each fork
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.speculative.eagle_worker",
    "sglang.srt.speculative.eagle_worker_v2",
)


def run_rank(job: Job, models: Path, rank: int, folder: Path) -> list[dict[str, Any]]:
    """Run the cases in order; after a failure the rest get a scheduler of their own."""
    os.environ.update(job.environment)
    if job.sabotage:
        apply_sabotage(job.sabotage)
    answers: list[dict[str, Any]] = []
    scheduler, trace = None, Trace.begin()
    for number, case in enumerate(job.cases):
        try:
            rendezvous = folder / f"ranks-{number}"
            scheduler = scheduler or build_scheduler(job.engine, models, rank, rendezvous)
            answers.append({"result": Conversation(scheduler, case, trace).run().dump()})
        except BaseException:  # a refusal exits the process: that is an answer, too
            scheduler = None
            answers.append({"error": traceback.format_exc()})
    return answers


def run_forked(job: Job, models: Path) -> list[list[dict[str, Any]]]:
    """Run the job in one child process a rank; what it does to its process stays there."""
    ranks = range(job.engine.options.get("tp_size", 1))
    answers = []
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        children = [_fork(run_rank, job, models, rank, Path(folder)) for rank in ranks]
        for child, pipe in children:
            with pipe:
                text = pipe.read()
            _, status = os.waitpid(child, 0)
            failure = {"error": f"the engine process ended with status {status}"}
            answers.append(json.loads(text) if status == 0 else [failure] * len(job.cases))
    return answers


def _fork(run: Callable[..., object], *arguments: object) -> tuple[int, TextIO]:
    """Start a child; return its id and what it will write: the answer as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        json.dump(run(*arguments), pipe)
    sys.stderr.flush()
    os._exit(0)


def serve(jobs: TextIO, answers: TextIO, models: Path) -> None:
    """Answer jobs until the input ends."""
    for line in jobs:
        answers.write(json.dumps(run_forked(Job.load(json.loads(line)), models)) + "\n")
        answers.flush()


if __name__ == "__main__":
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    serve(sys.stdin, protocol, Path(sys.argv[1]))
