"""Cases on seeds, spread over processes."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from loadtest.virtual.arms import CaseResult, run_case
from loadtest.virtual.bench import Case

Job = tuple[Case, int, bool]


def run_jobs(
    jobs: Sequence[Job], show: Callable[[int, int], None] = lambda *_: None, processes: int = 0
) -> list[CaseResult]:
    """Run all jobs and return their results in order; `show` takes how many of how many are done.

    `processes` 0: one for each core; 1: this one. Results are the same however they are spread.
    """
    workers = min(processes or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        found = []
        for done, job in enumerate(jobs, 1):
            found.append(run_case(*job))
            show(done, len(jobs))
        return found
    # Not forked: a fork would copy whatever threads and locks the caller has.
    context = multiprocessing.get_context("spawn")
    results: dict[int, CaseResult] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(run_case, *job): place for place, job in enumerate(jobs)}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                results[futures[future]] = future.result()
                show(done, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[place] for place in range(len(jobs))]
