"""`crossover-loadtest run`: one load, its figures, its rows."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from loadtest import results
from loadtest.bar import bar
from loadtest.endings import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOTHING, ended, say
from loadtest.preflight import InputError, check_server
from loadtest.provenance import provenance
from loadtest.reading import InputFileError
from loadtest.record import RunResult, row_object
from loadtest.run_flags import RunPlan, plan_run
from loadtest.runner import run_blocking
from loadtest.stats import summarise
from loadtest.validity import client_figures

_COMMAND = "crossover-loadtest run"


def main(argv: Sequence[str]) -> int:
    """Run `crossover-loadtest run`; return its exit code."""
    return ended(
        _COMMAND,
        lambda: _run(argv),
        (InputError, InputFileError, ValueError, results.OutputError),
        stopped="stopped; nothing is kept",
    )


def _run(argv: Sequence[str]) -> int:
    plan = plan_run(argv)
    for path in (plan.json, plan.rows):
        if path is not None:
            results.check_writable(path)
    _check_servers(plan)
    with bar(plan.requests, plan.duration_s) as show:
        result = run_blocking(plan.load, processes=plan.processes, show=show)
    return _report(plan, result, ["crossover-loadtest", "run", *argv])


def _check_servers(plan: RunPlan) -> None:
    """Say of each server that cannot take the load; InputError if none can."""
    problems = []
    for url in plan.urls:
        try:
            check_server(url, plan.model, plan.api_key)
        except InputError as error:
            problems.append(error)
    if len(problems) == len(plan.urls):
        raise InputError("\n".join(str(problem) for problem in problems))
    for problem in problems:
        say(
            _COMMAND,
            f"{problem}; the other servers are measured, requests to it are counted as they fail",
        )


def run_figures(plan: RunPlan, result: RunResult) -> dict[str, object]:
    """Return the run as it stands in the results."""
    skipped = {reading.path: reading.skipped for reading in plan.readings}
    return (
        summarise(result.rows, result.duration_s)
        | client_figures(result)
        | {"load": plan.described, "lines_skipped": skipped}
    )


def _report(plan: RunPlan, result: RunResult, argv: Sequence[str]) -> int:
    figures = run_figures(plan, result)
    unwritten = _write(plan, result, figures, argv)
    for reading in plan.readings:
        if reading.skipped:
            examples = "; ".join(reading.examples)
            say(_COMMAND, f"{reading.skipped} lines of {reading.path} left out: {examples}")
    print(
        summary(figures, plan.requests),
        file=sys.stderr if "-" in (plan.json, plan.rows) else sys.stdout,
    )
    if unwritten is not None:
        raise unwritten
    if result.gave_up is not None:
        raise InputError(f"gave up, nothing was ever answered: {result.gave_up}")
    if result.interrupted:
        say(_COMMAND, f"stopped after {len(result.rows)} requests; what was measured is kept")
        return EXIT_INTERRUPTED
    return EXIT_DONE if figures["finished"] else EXIT_NOTHING


def _write(
    plan: RunPlan, result: RunResult, figures: Mapping[str, object], argv: Sequence[str]
) -> results.OutputError | None:
    """Write what can be written; the error is for after the summary, which needs no file."""
    unwritten = None
    try:
        if plan.rows is not None:
            write_rows(plan.rows, result)
    except results.OutputError as error:
        unwritten = error
    try:
        if plan.json is not None:
            made = provenance(argv, plan.seed)
            results.write(plan.json, results.document({"run": figures}, made))
    except results.OutputError as error:
        unwritten = error
    return unwritten


def write_rows(path: str, result: RunResult) -> None:
    """Write a JSON line for each request, those of the warm-up first; OutputError if it fails."""
    try:
        with _opened(path) as file:
            for warmup, rows in ((True, result.warmup), (False, result.rows)):
                file.writelines(json.dumps(row_object(r, warmup=warmup)) + "\n" for r in rows)
    except OSError as error:
        raise results.OutputError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
    else:
        with Path(path).open("w") as file:
            yield file


def summary(figures: Mapping[str, object], requests: int | None) -> str:
    """Return the figures as lines."""
    client, warmup = _object(figures["client"]), _object(figures["warmup"])
    lag = _object(client["lag_ms"])
    of = "" if requests in (None, figures["requests"]) else f" of {requests}"
    lines = [
        f"{figures['requests']}{of} requests, {figures['errors']} failed, {figures['cut']} cut",
        f"{figures['tokens']} tokens in {figures['duration_s']} s: {figures['tok_s']} tok/s",
    ]
    for key, label in (("ttft_ms", "TTFT"), ("itl_ms", "inter-token"), ("e2e_ms", "end to end")):
        spread = _object(figures[key])
        lines.append(f"{label}: p50 {_in_ms(spread['p50'])}, p99 {_in_ms(spread['p99'])}")
    lines.append(
        f"warm-up: {warmup['requests']} requests, {warmup['errors']} failed, not counted above"
    )
    lines.append(
        f"client: {client['cpu_s']} s of CPU in {client['processes']} process(es), "
        f"late by p50 {_in_ms(lag['p50'])}, p99 {_in_ms(lag['p99'])}"
    )
    lines += [f"failed, {kind}: {count}" for kind, count in _object(figures["error_kinds"]).items()]
    examples, reasons = figures["error_examples"], figures["invalid_because"]
    assert isinstance(examples, list)
    assert isinstance(reasons, list)
    lines += [f"  {example}" for example in examples]
    lines += [f"INVALID: {reason}" for reason in reasons]
    return "\n".join(lines)


def _object(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict)
    return value


def _in_ms(value: object) -> str:
    return "-" if value is None else f"{value:.1f} ms"
