"""`crossover doctor`: looks at the servers as an operator would, and says what to change."""

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

from router.core.parity import compare
from router.core.types import Role
from router.dataplane.checkup import Seen, look
from router.settings import Settings

EXIT_OK = 0
EXIT_FAILED = 1

ANSWER_S_MAX = 0.25
CLOCK_S_MAX = 5.0
_LOADED = "loaded"


class Verdict(StrEnum):
    """How a check ended. `fail` is for what breaks requests, `warn` for what may be meant."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_COLOURS = {Verdict.OK: "\x1b[32m", Verdict.WARN: "\x1b[33m", Verdict.FAIL: "\x1b[31m"}
_PLAIN = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one server, or of all (`server` is None), and what to change, if anything."""

    check: str
    server: str | None
    verdict: Verdict
    text: str


def main(settings: Settings, *, as_json: bool) -> int:
    """Look, print, and return the exit code: 1 if anything failed."""
    findings = examine(asyncio.run(look(settings)), settings)
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"well": not failed, "findings": [asdict(each) for each in findings]}))
    else:
        print("\n".join(lines(findings, colour=_colours(sys.stdout, os.environ))))
    return EXIT_FAILED if failed else EXIT_OK


def examine(seen: Sequence[Seen], settings: Settings) -> list[Finding]:
    """Judge what was seen."""
    findings = [finding for each in seen for finding in _server(each, settings)]
    facts = [each.facts for each in seen if each.facts is not None]
    if len(facts) > 1:
        warnings = compare(facts)
        findings += [_parity(warning) for warning in warnings]
        if not warnings:
            findings.append(Finding("parity", None, Verdict.OK, "the servers are alike"))
    return findings


def lines(findings: Iterable[Finding], *, colour: bool) -> list[str]:
    """Return a line for each finding."""
    shown = []
    for finding in findings:
        word = f"{finding.verdict:4}"
        if colour:
            word = f"{_COLOURS[finding.verdict]}{word}{_PLAIN}"
        shown.append(f"{word}  {finding.server or 'all':10}  {finding.check:10}  {finding.text}")
    return shown


def _server(seen: Seen, settings: Settings) -> Iterator[Finding]:
    name = seen.server.name

    def found(check: str, verdict: Verdict, text: str) -> Finding:
        return Finding(check, name, verdict, text)

    if seen.error is not None:
        yield found("reachable", Verdict.FAIL, f"{seen.server.url}: {seen.error}")
        return
    yield found("reachable", Verdict.OK, f"{seen.server.url} answers /health")
    if seen.answer_s is None:
        yield found("key", Verdict.FAIL, _refused(seen))
        return
    yield found("key", Verdict.OK, "/v1/models is told")
    yield found(*_latency(seen))
    yield found(*_metrics(seen))
    yield found(*_keepalive(seen, settings.keepalive_s))
    yield found(*_queue(seen))
    yield found(*_admin(seen))
    for remark in seen.remarks:
        yield found("settings", Verdict.WARN, remark)
    plugin = _plugin(seen)
    if plugin is not None:
        yield found(*plugin)


_Part = tuple[str, Verdict, str]


def _refused(seen: Seen) -> str:
    if seen.refused in (401, 403):
        return (
            f"HTTP {seen.refused} for /v1/models: set upstream_api_key_file, or api_key_file of"
            f" this server, to its --api-key"
        )
    return f"no answer to GET /v1/models (HTTP {seen.refused}): is {seen.server.url} SGLang?"


def _latency(seen: Seen) -> _Part:
    assert seen.answer_s is not None
    took = f"/v1/models took {seen.answer_s * 1e3:.0f} ms"
    ahead_s = seen.clock_ahead_s
    if seen.answer_s > ANSWER_S_MAX:
        return "latency", Verdict.WARN, f"{took}: is it far away, or short of CPU?"
    if ahead_s is not None and abs(ahead_s) > CLOCK_S_MAX:
        where = "ahead of" if ahead_s > 0 else "behind"
        text = f"its clock is {abs(ahead_s):.0f} s {where} ours: logs will not match; run NTP"
        return "latency", Verdict.WARN, text
    return "latency", Verdict.OK, took


def _metrics(seen: Seen) -> _Part:
    if seen.has_metrics:
        return "metrics", Verdict.OK, "/metrics has sglang: series"
    text = "no sglang: series in /metrics: start it with --enable-metrics"
    return "metrics", Verdict.WARN, text


def _keepalive(seen: Seen, keepalive_s: float) -> _Part:
    if seen.idle_watched_s is None:
        return "keep-alive", Verdict.WARN, "could not be watched"
    if seen.idle_closed_s is not None:
        text = (
            f"closes an idle connection after {seen.idle_closed_s:.1f} s, before our keepalive_s of"
            f" {keepalive_s:g}: requests may break; set SGLANG_TIMEOUT_KEEP_ALIVE above it, or"
            " keepalive_s below"
        )
        return "keep-alive", Verdict.FAIL, text
    if seen.idle_watched_s < keepalive_s:
        text = (
            f"an idle connection was watched for {seen.idle_watched_s:g} s only, not for our"
            f" keepalive_s of {keepalive_s:g}: see that SGLANG_TIMEOUT_KEEP_ALIVE is more"
        )
        return "keep-alive", Verdict.WARN, text
    text = f"keeps an idle connection for our keepalive_s of {keepalive_s:g}"
    return "keep-alive", Verdict.OK, text


def _queue(seen: Seen) -> _Part:
    if seen.max_queued is None:
        text = "no limit on waiting requests: set --max-queued-requests, or they wait for ever"
        return "queue", Verdict.WARN, text
    return "queue", Verdict.OK, f"{seen.max_queued} requests may wait"


def _admin(seen: Seen) -> _Part:
    if seen.admin_error is None:
        return "admin key", Verdict.OK, "aborts are taken"
    text = (
        f"{seen.admin_error}: a client that leaves cannot stop its request at once; set"
        " upstream_admin_key_file, or admin_key_file of this server, to its --admin-api-key"
    )
    return "admin key", Verdict.FAIL, text


def _plugin(seen: Seen) -> _Part | None:
    if seen.switch is None:
        if seen.server.role is Role.BASE:
            return None
        text = "none: it speculates at every load; to switch by load, install the plugin"
        return "plugin", Verdict.WARN, text
    state = seen.switch.state
    if state == _LOADED and seen.server.role is Role.SPEC:
        text = "loaded, but it switches nothing: spec_switch.reason in /server_info says why"
        return "plugin", Verdict.WARN, text
    later = "" if state == "active" else "; active after its first decode step"
    return "plugin", Verdict.OK, f"{state}, speculation {seen.switch.mode}{later}"


def _parity(warning: str) -> Finding:
    # Requests name the model: with two names, half of them fail.
    failed = warning.startswith("served_model_name")
    return Finding("parity", None, Verdict.FAIL if failed else Verdict.WARN, warning)


def _colours(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR")
