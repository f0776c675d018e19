import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from loadtest.children import free_port
from loadtest.preflight import InputError
from loadtest.server_facts import ask

MODELS = {"data": [{"id": "m"}]}
INFO = {
    "version": "0.5.12.post1",
    "api_key": "sk-secret",
    "admin_api_key": "sk-admin",
    "speculative_algorithm": "EAGLE3",
    "tp_size": 4,
    "dtype": "x" * 500,
    "attention_backend": {"nested": "sk-nested"},
    "spec_switch": {"state": "active", "threshold": 8, "secret": "sk-switch"},
}


@contextmanager
def server(answers: Mapping[str, Any], key: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            refused = key is not None and self.headers["authorization"] != f"Bearer {key}"
            found = answers.get(self.path)
            status = 401 if refused else 200 if found is not None else 404
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            thread.join()


def test_only_plain_flags_of_the_list_are_kept_and_no_key() -> None:
    with server({"/v1/models": MODELS, "/server_info": INFO}, key="k") as url:
        facts = ask(url, "m", "k")
    assert facts.to_json() == {
        "version": "0.5.12.post1",
        "speculative_algorithm": "EAGLE3",
        "tp_size": 4,
        "spec_switch": {"state": "active", "threshold": 8},
    }
    assert facts.version == "0.5.12.post1"
    assert facts.clock == 1.0


def test_a_router_tells_its_policy() -> None:
    state = {"version": "1", "layout": "shared", "policy": {"name": "threshold", "mode": "spec"}}
    with server({"/v1/models": MODELS, "/crossover/state": state}) as url:
        facts = ask(url, "m", None)
    assert facts.router
    assert facts.to_json() == {
        "version": "1",
        "layout": "shared",
        "policy": {"name": "threshold"},
    }


@pytest.mark.parametrize("info", [b"no JSON", b"[]", b"[" * 100_000, None])
def test_nonsense_is_as_nothing_told(info: bytes | None) -> None:
    with server({"/v1/models": MODELS} | ({"/server_info": info} if info else {})) as url:
        assert ask(url, "m", None).to_json() == {}


def test_a_key_that_is_refused_and_a_model_that_is_not_there_are_errors() -> None:
    with server({"/v1/models": MODELS}, key="k") as url:
        with pytest.raises(InputError, match="the API key is refused"):
            ask(url, "m", "wrong")
        with pytest.raises(InputError, match="has no model 'x', only: m"):
            ask(url, "x", "k")


def test_a_server_that_does_not_answer_is_a_problem_and_no_error() -> None:
    facts = ask(f"http://127.0.0.1:{free_port()}", "m", None)
    assert "does not answer" in (facts.problem or "")
