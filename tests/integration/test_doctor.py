"""`crossover doctor` in front of servers on real sockets, each with one thing wrong."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loadtest.children import free_port
from loadtest.engines import ENGINES
from loadtest.sim_server import EngineSpec, SimServer
from router.cli import main
from router.tls import ServerTls
from tests.certificates import authority
from tests.integration.rig import Call, Engine

pytestmark = pytest.mark.anyio

DATE = "date: Tue, 01 Jan 2030 00:00:00 GMT"


@dataclass
class Patient:
    """What a scripted server tells. It is well unless a test changes something."""

    info: dict[str, Any] = field(
        default_factory=lambda: {
            "version": "1", "dtype": "bfloat16", "chat_template": None,
            "max_running_requests": 8, "max_queued_requests": 16, "speculative_algorithm": None,
        }
    )  # fmt: skip
    model: str = "m"
    context: int = 4096
    metrics: str = "sglang:num_running_reqs 0"
    switch: dict[str, Any] | None = None
    key: str | None = None
    admin_key: str | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    closes_idle: bool = False
    lines: tuple[str, ...] = ()

    async def __call__(self, call: Call) -> None:
        path = call.target
        given = (call.header("authorization") or "").removeprefix("Bearer ")
        wanted = self.admin_key if path == "/abort_request" and self.admin_key else self.key
        free = path in ("/health", "/metrics")
        status = 401 if wanted and given != wanted and not free else self.statuses.get(path, 200)
        await call.reply(self.body(path), status, *self.lines)
        if self.closes_idle and path == "/v1/models":
            call.reset()

    def body(self, path: str) -> bytes:
        if path == "/metrics":
            return self.metrics.encode()
        load = {"num_running_reqs": 0, "spec_switch": self.switch}
        card = {"id": self.model, "max_model_len": self.context}
        told = {
            "/server_info": self.info,
            "/v1/models": {"data": [card]},
            "/v1/loads": {"loads": [load]},
        }
        return json.dumps(told.get(path, {})).encode()


def spec() -> Patient:
    patient = Patient(switch={"state": "active", "mode": "on", "threshold": 8})
    patient.info["speculative_algorithm"] = "EAGLE3"
    return patient


@asynccontextmanager
async def clinic(**patients: Patient) -> AsyncIterator[list[str]]:
    """Run the servers; return the flags that name them."""
    engines = {name: Engine(patient) for name, patient in patients.items()}
    for name, engine in engines.items():
        engine.abort_script = patients[name]
        await engine.start()
    try:
        yield [flag for name, each in engines.items() for flag in (f"--{name}-url", each.url)]
    finally:
        for engine in engines.values():
            await engine.stop()


async def examined(
    flags: list[str], capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[tuple[str | None, str], tuple[str, str]]]:
    """Run the command; return its exit code, and verdict and text by server and check."""
    flags = ["doctor", *flags, "--keepalive-s", "0.05", "--json", *more]
    code = await asyncio.to_thread(main, flags)
    told = json.loads(capsys.readouterr().out)
    assert told["well"] is (code == 0)
    return code, {
        (each["server"], each["check"]): (each["verdict"], each["text"])
        for each in told["findings"]
    }


async def test_two_servers_that_are_well(capsys: pytest.CaptureFixture[str]) -> None:
    async with clinic(spec=spec(), base=Patient()) as flags:
        code, found = await examined(flags, capsys)
    assert code == 0
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    checks = {"reachable", "key", "latency", "metrics", "keep-alive", "queue", "admin key"}
    assert {check for server, check in found if server == "base"} == checks
    assert {check for server, check in found if server == "spec"} == {*checks, "plugin"}
    assert found[None, "parity"][1] == "the servers are alike"


@pytest.mark.parametrize(
    ("change", "check", "verdict", "advice"),
    [
        ({"statuses": {"/health": 503}}, "reachable", "fail", "GET /health: HTTP 503"),
        ({"statuses": {"/v1/models": 404}}, "key", "fail", "is http://.* SGLang"),
        ({"key": "s3cret"}, "key", "fail", "set upstream_api_key_file"),
        ({"metrics": "python_info 1"}, "metrics", "warn", "--enable-metrics"),
        ({"statuses": {"/metrics": 404}}, "metrics", "warn", "--enable-metrics"),
        ({"closes_idle": True}, "keep-alive", "fail", "set SGLANG_TIMEOUT_KEEP_ALIVE"),
        ({"info": {"max_queued_requests": None}}, "queue", "warn", "--max-queued-requests"),
        ({"admin_key": "s3cret"}, "admin key", "fail", "HTTP 401.*set upstream_admin_key_file"),
        ({"info": {"speculative_algorithm": "EAGLE3"}}, "settings", "warn", "URLs swapped"),
        ({"lines": (DATE,)}, "latency", "warn", "ahead of ours.*NTP"),
        ({"model": "other"}, "parity", "fail", "served_model_name differs"),
        ({"context": 2048}, "parity", "warn", "context_length differs"),
        (
            {"info": {"max_running_requests": 48}}, "parity", "warn",
            "max_running_requests differs.*--max-running-requests",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_told_with_what_to_change(
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    check: str,
    verdict: str,
    advice: str,
) -> None:
    patient = Patient()
    patient.info |= change.pop("info", {})
    for name, value in change.items():
        setattr(patient, name, value)
    async with clinic(spec=spec(), base=patient) as flags:
        code, found = await examined(flags, capsys)
    told, text = found[None if check == "parity" else "base", check]
    assert told == verdict
    assert re.search(advice, text), text
    assert code == (1 if verdict == "fail" else 0)


@pytest.mark.parametrize(
    ("switch", "verdict", "text"),
    [
        (None, "warn", "speculates at every load"),
        ({"state": "loaded", "mode": "on"}, "warn", "switches nothing"),
        ({"state": "armed", "mode": "on"}, "ok", "active after its first decode step"),
        ({"state": "active", "mode": "off"}, "ok", "active, speculation off"),
    ],
)
async def test_the_plugins_state_is_told(
    capsys: pytest.CaptureFixture[str], switch: dict[str, Any] | None, verdict: str, text: str
) -> None:
    patient = spec()
    patient.switch = switch
    async with clinic(spec=patient, base=Patient()) as flags:
        _, found = await examined(flags, capsys)
    assert found["spec", "plugin"][0] == verdict
    assert text in found["spec", "plugin"][1]


async def test_a_server_that_is_not_there_hides_nothing_of_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with clinic(base=Patient()) as flags:
        code, found = await examined(
            [*flags, "--spec-url", f"http://127.0.0.1:{free_port()}"], capsys
        )
    assert code == 1
    assert found["spec", "reachable"][0] == "fail"
    assert found["base", "queue"] == ("ok", "16 requests may wait")


async def test_keys_are_used_and_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("key", "boss"):
        (tmp_path / name).write_text(f"s3cret-{name}")
    patients = {"spec": spec(), "base": Patient()}
    for patient in patients.values():
        patient.key, patient.admin_key = "s3cret-key", "s3cret-boss"
    keys = ["--upstream-api-key-file", str(tmp_path / "key")]
    async with clinic(**patients) as flags:
        code, found = await examined([*flags, *keys], capsys)
        assert code == 1
        assert found["spec", "admin key"][0] == "fail"
        keys += ["--upstream-admin-key-file", str(tmp_path / "boss")]
        code, found = await examined([*flags, *keys], capsys)
    assert code == 0
    assert "s3cret" not in str(found)


async def test_it_looks_through_tls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ca = authority(tmp_path)
    engine = Engine(spec(), ServerTls(ca.pair("127.0.0.1")).context())
    await engine.start()
    flags = ["--spec-url", engine.url, "--policy", "spec-only"]
    try:
        code, found = await examined(flags, capsys)
        assert code == 1
        assert "certificate verify failed" in found["spec", "reachable"][1]
        code, _ = await examined(flags, capsys, "--upstream-ca-file", ca.ca_file)
        assert code == 0
    finally:
        await engine.stop()


async def test_the_simulated_servers_are_found_well_but_for_what_they_lack(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = {"spec": free_port(), "base": free_port()}
    models = {"spec": "h200-tree-v1", "base": "h200-plain"}
    specs = [EngineSpec(name, ENGINES[models[name]], port) for name, port in ports.items()]
    async with SimServer(specs):
        flags = [
            x for name, port in ports.items() for x in (f"--{name}-url", f"http://127.0.0.1:{port}")
        ]
        code, found = await examined(flags, capsys)
    assert code == 0
    assert "speculates at every load" in found["spec", "plugin"][1]


async def test_a_reader_gets_a_line_for_each_check_without_colour_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with clinic(spec=spec(), base=Patient()) as flags:
        assert await asyncio.to_thread(main, ["doctor", *flags, "--keepalive-s", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "ok    all         parity      the servers are alike"


def test_bad_settings_are_told_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--spec-url", "nowhere"]) == 2
    assert "--spec-url" in capsys.readouterr().err
