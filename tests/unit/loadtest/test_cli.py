"""`crossover-loadtest` as a user meets it, against simulated engines in the same process."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio.from_thread
import httpx
import pytest

from loadtest.children import free_port
from loadtest.cli import main
from loadtest.engines import ENGINES
from loadtest.run_flags import parser
from loadtest.sim_server import MODEL_NAME, EngineSpec, SimOptions, SimServer


@pytest.fixture(name="engine_url")
def _engine_url() -> Iterator[str]:
    """A plain engine on a fast clock, in a thread of its own: the command runs in this one."""
    server = SimServer([EngineSpec("base", ENGINES["h200-plain"])], SimOptions(clock=50.0))
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(server),
    ):
        yield server.urls["base"]


def run(url: str, *more: str) -> int:
    size = ["--requests", "8", "--concurrency", "4", "--output-tokens", "20"]
    return main(["run", "--url", url, "--model", MODEL_NAME, *size, *more])


def test_a_run_reports_what_was_asked_for(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert run(engine_url, "--json", str(path), "--api-key", "sk-1") == 0
    found = json.loads(path.read_text())
    assert found["schema"] == 1
    figures = found["runs"]["run"]
    assert (figures["tokens"], figures["requests"], figures["errors"]) == (160, 8, 0)
    assert set(figures) >= {"tok_s", "ttft_ms", "itl_ms", "e2e_ms", "switches"}
    assert figures["e2e_ms"]["p99"] >= figures["e2e_ms"]["p50"] > 0
    assert "sk-1" not in path.read_text()
    assert "8 requests, 0 failed" in capsys.readouterr().out


def test_results_on_stdout_are_json_alone(
    engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(engine_url, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["runs"]["run"]["requests"] == 8
    assert "tok/s" in captured.err


def test_a_model_that_the_server_has_not_is_named_with_those_it_has(
    engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--url", engine_url, "--model", "other"]) == 2
    assert f"has no model 'other', only: {MODEL_NAME}" in capsys.readouterr().err


def test_a_url_that_refuses_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run(url) == 2
    error = capsys.readouterr().err
    assert f"{url} does not answer" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("url", ["localhost", "http://user:secret@127.0.0.1"])
def test_a_bad_url_is_one_message(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url) == 2
    error = capsys.readouterr().err
    assert error.startswith("crossover-loadtest run: ")
    assert "secret" not in error


def test_an_unwritable_output_is_known_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("http://127.0.0.1:1", "--json", str(tmp_path)) == 2
    assert f"cannot write {tmp_path}" in capsys.readouterr().err


@contextmanager
def answering(status: int, models_status: int) -> Iterator[str]:
    """A server with one answer to /v1/models and another to everything else."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(models_status)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(status)

        def _answer(self, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"no")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_missing_key_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CROSSOVER_API_KEY", raising=False)
    with answering(401, 401) as url:
        assert run(url) == 2
    error = capsys.readouterr().err
    assert "an API key is needed (HTTP 401)" in error
    assert "--api-key-file" in error


def test_a_refused_key_is_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-from-a-file\n")
    monkeypatch.setenv("CROSSOVER_API_KEY", "sk-from-the-environment")
    with answering(401, 401) as url:
        assert run(url, "--api-key-file", str(key_file)) == 2
        assert run(url) == 2
        assert run(url, "--api-key", "sk-from-a-flag") == 2
    captured = capsys.readouterr()
    assert captured.err.count("the API key is refused (HTTP 401)") == 3
    assert "sk-" not in captured.err + captured.out


def test_rows_have_every_request_and_the_warm_up_marked(engine_url: str, tmp_path: Path) -> None:
    path, rows = tmp_path / "run.json", tmp_path / "rows.jsonl"
    assert run(engine_url, "--json", str(path), "--rows", str(rows), "--warmup", "3") == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["warmup"] for row in found] == [True] * 3 + [False] * 8
    measured = found[3:]
    assert sum(row["tokens"] for row in measured) == 160
    assert {row["ending"] for row in measured} == {"ok"}
    for row in measured:
        assert row["intended_s"] <= row["sent_s"] <= row["first_s"] <= row["last_s"] <= row["end_s"]
        assert row["last_s"] - row["first_s"] == pytest.approx(sum(row["gaps_s"]), abs=1e-4)
        assert (row["status"], row["url"]) == (200, engine_url)
    figures = json.loads(path.read_text())["runs"]["run"]
    assert figures["warmup"] == {"requests": 3, "errors": 0, "excluded": True}
    assert figures["client"]["cpu_s"] > 0
    assert isinstance(figures["valid"], bool)
    assert figures["load"]["loop"] == "closed"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "200", "--arrivals", "constant"],
        ["--rate", "100..300/1", "--requests", "8"],
        ["--rate", "200", "--arrivals", "gamma", "--cv", "3"],
        ["--concurrency", "1/0.1,4", "--requests", "8"],
        ["--api", "generate", "--turns", "2", "--shared-prefix", "20:2"],
        ["--api", "completions", "--processes", "2"],
        ["--prompt-tokens", "4-40", "--output-tokens", "lognormal:20,0.5,40"],
    ],
    ids=" ".join,
)
def test_every_kind_of_load_is_answered(
    engine_url: str, tmp_path: Path, arguments: list[str]
) -> None:
    path = tmp_path / "run.json"
    where = ["run", "--url", engine_url, "--model", MODEL_NAME, "--requests", "8"]
    assert main([*where, "--json", str(path), *arguments]) == 0
    figures = json.loads(path.read_text())["runs"]["run"]
    assert (figures["requests"], figures["finished"], figures["errors"]) == (8, 8, 0)


def test_a_trace_gives_arrivals_and_lengths_and_its_bad_lines_are_counted(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path, rows = tmp_path / "trace.csv", tmp_path / "run.json", tmp_path / "rows.jsonl"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n5.0,7,3\noops\n5.4,9,4\n")
    where = ["run", "--url", engine_url, "--model", MODEL_NAME, "--trace", str(trace)]
    assert main([*where, "--time-scale", "0.5", "--json", str(path), "--rows", str(rows)]) == 0
    measured = [json.loads(line) for line in rows.read_text().splitlines()][1:]
    assert [row["tokens"] for row in measured] == [3, 4]
    assert [row["intended_s"] for row in measured] == pytest.approx([0.0, 0.2])
    assert json.loads(path.read_text())["runs"]["run"]["lines_skipped"] == {str(trace): 1}
    assert f"1 lines of {trace} left out: {trace}:3: 1 fields" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_costs_neither_figures_nor_a_trace(
    engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(engine_url, "--rows", "/dev/full") == 2
    captured = capsys.readouterr()
    assert "8 requests, 0 failed" in captured.out
    assert captured.err == (
        "crossover-loadtest run: cannot write /dev/full: No space left on device\n"
    )


def test_real_prompts_are_sent(engine_url: str, tmp_path: Path) -> None:
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n{"prompt": "one", "max_tokens": 5}\n')
    assert run(engine_url, "--prompts", str(prompts), "--rows", str(rows), "--warmup", "0") == 0
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["max_tokens"] for row in measured] == [20, 5] * 4
    assert [row["prompt_tokens"] for row in measured[:2]] == [7, 5]


def test_one_dead_url_of_two_is_told_and_the_other_is_measured(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, dead = tmp_path / "run.json", f"http://127.0.0.1:{free_port()}"
    assert run(engine_url, "--url", dead, "--json", str(path)) == 0
    figures = json.loads(path.read_text())["runs"]["run"]
    assert (figures["finished"], figures["error_kinds"]) == (4, {"connect": 4})
    assert f"{dead} does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "asks for nothing|needs its seconds"),
        (["--concurrency", "4", "--rate", "4"], "not allowed with"),
        (["--requests", "0"], "whole number from 1"),
        (["--requests", "x"], "whole number from 1"),
        (["--duration", "nan"], "above 0"),
        (["--prompt-tokens", "9-3"], "is no length"),
        (["--output-tokens", "lognormal:1"], "is no length"),
        (["--arrivals", "constant"], "--arrivals goes with --rate"),
        (["--rate", "1", "--arrivals", "gamma"], "needs --cv"),
        (["--rate", "1", "--cv", "2"], "--cv goes with"),
        (["--time-scale", "2"], "--time-scale goes with --trace"),
        (["--trace", "/nowhere/trace.csv"], "cannot read /nowhere/trace.csv"),
        (["--prompts", "/dev/null"], "/dev/null is empty"),
        (["--prompts", "/dev/null", "--prompt-tokens", "5"], "has its own"),
        (["--api-key-file", "/dev/null"], "/dev/null is empty"),
        (["--json", "-", "--rows", "-"], "cannot both be -"),
        (["--shared-prefix", "5:0"], "whole number from 1"),
        (["--rows", "/dev/null/rows"], "cannot write /dev/null/rows"),
        (["--processes", "65"], "from 1 to 64"),
        (["--api-key", "ключ"], "no header can carry"),
        (["--dance"], "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["run", "--url", "http://127.0.0.1:1", "--model", "m"]
    try:
        code = main([*where, *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert re.search(message, error)
    assert len(error.splitlines()) == 1


def test_ctrl_c_writes_what_was_measured(engine_url: str, tmp_path: Path) -> None:
    path, rows = tmp_path / "run.json", tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "loadtest", "run", "--url", engine_url, "--model", MODEL_NAME]
    ends = ["--rate", "40", "--duration", "600", "--json", str(path), "--rows", str(rows)]
    with subprocess.Popen([*command, *ends], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            deadline = time.monotonic() + 30
            while _generated(engine_url) < 256 * 5 and time.monotonic() < deadline:
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            out, error = run.communicate(timeout=30)
        finally:
            run.kill()
    assert run.returncode == 130
    assert b"what was measured is kept" in error
    figures = json.loads(path.read_text())["runs"]["run"]
    assert figures["interrupted"] is True
    assert figures["finished"] >= 3
    assert re.match(rf"{figures['requests']} of 2[0-9]{{4}} requests, 0 failed", out.decode())
    assert len(rows.read_text().splitlines()) == figures["requests"] + 1


def _generated(url: str) -> float:
    page = httpx.get(url + "/metrics").text
    found = re.search(r"^sglang:generation_tokens_total\{.*\} ([0-9.e+]+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_the_help_of_run_fits_a_screen_and_names_every_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 100
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert not [flag for flag in flags - {"-h", "--help"} if flag not in shown]


def test_a_server_that_fails_every_request_is_counted_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(500, 404) as url:
        assert run(url) == 1
    out = capsys.readouterr().out
    assert "8 requests, 8 failed" in out
    assert "HTTP 500: no" in out


def test_a_server_that_fails_for_long_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(500, 404) as url:
        assert main(["run", "--url", url, "--model", "m", "--requests", "100000"]) == 2
    captured = capsys.readouterr()
    assert "gave up, nothing was ever answered: HTTP 500" in captured.err
    assert "failed, http: " in captured.out


def test_the_help_fits_a_screen_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert "crossover-loadtest run --url" in shown


@pytest.mark.parametrize("arguments", [[], ["dance"]])
def test_an_unknown_command_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "run" in capsys.readouterr().err
