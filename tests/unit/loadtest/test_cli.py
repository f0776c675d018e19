"""`crossover-loadtest` as a user meets it, against simulated engines in the same process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio.from_thread
import pytest

from loadtest.children import free_port
from loadtest.cli import main
from loadtest.engines import ENGINES
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
    assert "--api-key" in error


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
    assert "gave up, nothing was ever answered: HTTP 500" in capsys.readouterr().err


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
