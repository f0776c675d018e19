"""`sweep` and `calibrate` as a user meets them, against simulated engines on real sockets."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest

from loadtest.children import free_port
from loadtest.cli import main
from loadtest.sim_server import MODEL_NAME, EngineSpec, SimOptions, SimServer
from router.core.calibration import Calibration
from router.core.types import Layout, Role
from tests.unit.loadtest.simulated_rows import line_engine

CLOCK = 20.0


@contextmanager
def engines(layout: Layout = Layout.DISJOINT) -> Iterator[dict[str, str]]:
    """Two engines whose curves cross at 4 requests, in a thread of their own."""
    specs = [
        EngineSpec("spec", line_engine(20.0, 10.0)),
        EngineSpec("base", line_engine(50.0, 2.5)),
    ]
    server = SimServer(specs, SimOptions(clock=CLOCK, layout=layout))
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(server),
    ):
        yield server.urls


def sweep(urls: dict[str, str], *words: str) -> int:
    targets = [word for name, url in urls.items() for word in ("--target", f"{name}={url}")]
    size = ["--output-tokens", "16", "--seconds", "8", "--warmup-s", "4", "--concurrency", "1,16"]
    return main(["sweep", *targets, "--model", MODEL_NAME, *size, *words])


def calibrate(urls: dict[str, str], *words: str) -> int:
    size = ["--output-tokens", "16", "--budget-s", "30", "--concurrency", "1,16"]
    places = ["--spec-url", urls["spec"], "--base-url", urls["base"]]
    return main(["calibrate", *places, "--model", MODEL_NAME, *size, *words])


def test_a_sweep_finds_the_crossover_and_leaves_all_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: tmp_path / name for name in ("sweep.json", "sweep.md", "rows", "plots")}
    words = ["--rounds", "1", "--api-key", "sk-1", "--step", "1/10,8/10"]
    words += ["--json", str(out["sweep.json"]), "--markdown", str(out["sweep.md"])]
    with engines() as urls:
        assert sweep(urls, *words, "--rows", str(out["rows"]), "--plots", str(out["plots"])) == 0
    found = json.loads(out["sweep.json"].read_text())
    assert (found["schema"], found["kind"]) == (1, "sweep")
    assert list(found["runs"]) == ["spec@1", "spec@16", "base@1", "base@16"]
    for run in found["runs"].values():
        assert run["errors"] == 0
        assert len(run["rounds"]) == 1
        assert run["spread"]["tok_s"][0] <= run["tok_s"] <= run["spread"]["tok_s"][1]
    assert found["crossover"]["between"] == [1, 16]
    assert len(found["drift"]["tok_s"]) == 2
    assert len(found["step"]["timeline"]["at_s"]) == 120
    assert found["provenance"]["clock"] == CLOCK
    assert found["provenance"]["servers"]["spec"]["simulation"]["engine"] == "line"
    assert "sk-1" not in out["sweep.json"].read_text()
    report = out["sweep.md"].read_text()
    assert "Simulated servers" in report
    assert found["crossover"]["sentence"] in report
    assert report == capsys.readouterr().out
    lines = (out["rows"] / "spec-16-round-1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # A request that the visit's end cut short may have had no head yet.
    assert {row["status"] for row in rows if row["ending"] == "ok"} == {200}
    assert sorted(path.name for path in out["plots"].iterdir()) == [
        f"{name}.{kind}" for name in ("latency", "speed", "step") for kind in ("png", "svg")
    ]


def test_a_target_that_does_not_answer_is_counted_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    dead = f"http://127.0.0.1:{free_port()}"
    with engines() as urls:
        words = ["--rounds", "1", "--json", str(path)]
        assert sweep({"base": urls["base"], "spec": dead}, *words) == 1
    found = json.loads(path.read_text())
    assert found["runs"]["base@16"]["errors"] == 0
    failed = found["runs"]["spec@16"]
    assert failed["errors"] == failed["error_kinds"]["connect"] > 0
    assert failed["tok_s"] is None
    assert found["crossover"] is None
    captured = capsys.readouterr()
    assert f"spec: {dead} does not answer" in captured.err
    assert "spec@16" in captured.out
    assert "Traceback" not in captured.err


def test_ctrl_c_keeps_the_visits_that_were_done(tmp_path: Path) -> None:
    path, rows = tmp_path / "sweep.json", tmp_path / "rows"
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(0.02):
            if (rows / "spec-1-round-1.jsonl").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watcher = threading.Thread(target=interrupt)
    with engines() as urls:
        watcher.start()
        try:
            assert sweep(urls, "--json", str(path), "--rows", str(rows)) == 130
        finally:
            done.set()
            watcher.join()
    found = json.loads(path.read_text())
    assert "spec@1" in found["runs"]
    assert "base@16" not in found["runs"]
    assert any("stopped before its end" in text for text in found["warnings"])


@pytest.mark.parametrize("layout", list(Layout))
def test_a_calibration_is_what_the_router_reads(
    layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    with engines(layout) as urls:
        words = ["--layout", layout, "--out", str(path), "--spec-gpus", "0-3", "--json", "-"]
        assert calibrate(urls, *words) == 0
    made = Calibration.from_json(json.loads(path.read_text()), str(path))
    assert (made.model, made.layout) == (MODEL_NAME, layout)
    spec, base = made.profile("spec", Role.SPEC), made.profile("base", Role.BASE)
    assert spec is not None
    assert base is not None
    assert (spec.gpus, base.gpus) == ("0-3", None)
    assert spec.engine_version == base.engine_version is not None
    for server in (spec, base):
        assert len(server.tpot) == 2
        assert server.tpot[0].s < server.tpot[1].s
        assert server.ttft
    assert spec.tpot[0].s < base.tpot[0].s
    assert spec.tpot[1].s > base.tpot[1].s
    assert made.interference is not None
    captured = capsys.readouterr()
    assert json.loads(captured.out)["calibration"] == made.to_json()
    assert "spec and base cross at" in captured.err


def test_targets_of_which_none_answers_are_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    out = str(tmp_path / "c.json")
    assert sweep({"spec": dead}) == 2
    assert calibrate({"spec": dead, "base": dead}, "--layout", "shared", "--out", out) == 2
    error = capsys.readouterr().err
    assert error.count(f"{dead} does not answer") == 2
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "/proc/x/y.json"], "cannot write /proc/x/y.json"),
        (["--rows", "/proc/x"], "cannot write /proc/x"),
        (["--plots", "/dev/null/plots"], "cannot write /dev/null/plots"),
        (["--model", "other"], f"has no model 'other', only: {MODEL_NAME}"),
        (["--target", "spec=http://127.0.0.1:1"], "two targets have the same name"),
        (["--target", "x=nowhere"], "'nowhere' is not a URL"),
        (["--rounds", "101"], "101 rounds are too many: 100 at most"),
    ],
)
def test_what_cannot_be_swept_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines() as urls:
        assert sweep(urls, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "4,2"], "levels must rise"),
        (["--concurrency", "0"], "must be a whole number of at least 1, not '0'"),
        (["--concurrency", "1,x"], "must be a whole number of at least 1, not 'x'"),
        (["--step", "1,64"], "needs its seconds"),
        (["--step", "1/10,64"], "needs its seconds"),
        (["--target", "spec"], "a target is NAME=URL"),
        (["--seconds", "nan"], "must be a number above 0"),
        (["--seconds", "x"], "must be a number above 0"),
    ],
)
def test_options_that_cannot_be_read_say_what_is_allowed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        sweep({"spec": "http://127.0.0.1:1"}, *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "calibrate", "compare"])
def test_help_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"crossover-loadtest {command}" in capsys.readouterr().out


def test_a_calibration_that_cannot_be_is_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with engines() as urls:
        words: list[Any] = ["--layout", "shared", "--out", "/dev/null/c.json"]
        assert calibrate(urls, *words) == 2
        assert calibrate(urls, "--layout", "shared", "--budget-s", "2") == 2
    error = capsys.readouterr().err
    assert "cannot write /dev/null/c.json" in error
    assert "2 s are too short for 2 levels" in error
