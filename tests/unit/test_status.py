"""One screen of a router: what it says, the plot, and what happens where there is no router."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from router.cli import main
from router.curve_plot import COLUMNS, ROWS, Curve, plot
from router.status import StatusError, coloured, screen

URL = "http://127.0.0.1:30000"


def server(name: str, role: str, sequences: int) -> dict[str, Any]:
    return {
        "name": name, "role": role, "state": "up", "drained": False,
        "load": {"sequences": sequences},
        "engine": {
            "running": sequences + 2, "queued": 1, "token_usage": 0.25,
            "switch": {"state": "active", "mode": "off", "off_share": 0.31},
        },
    }  # fmt: skip


def curve(at_one: float, slope: float) -> dict[str, Any]:
    loads = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return {"windows": 20, "tpot": [{"sequences": n, "s": at_one + slope * n} for n in loads]}


TOLD: dict[str, Any] = {
    "state": {
        "version": "1.2.3", "layout": "disjoint", "layout_warning": "they seem to share GPUs",
        "stage": "serving", "settings_latest": True,
        "policy": {
            "name": "marginal", "objective": "summed", "configured": "marginal", "override": None,
        },
        "servers": [server("fast", "spec", 4), server("wide", "base", 0)],
        "parity_warnings": ["dtype differs"],
    },
    "model": {
        "crossover": 9,
        "regret": {"o1": -0.1, "o2": 0.004, "o3": 0.02},
        "servers": {"fast": curve(0.004, 0.0008), "wide": curve(0.008, 0.0001)},
    },
    "decisions": {"decisions": [{"reason": "marginal"}] * 3 + [{"reason": "explore"}]},
}  # fmt: skip


def test_a_screen_has_the_policy_the_servers_the_crossover_and_the_reasons() -> None:
    text = screen(URL, TOLD)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "crossover 1.2.3 at http://127.0.0.1:30000: policy marginal (summed), layout" in lines[0]
    assert "crossover: base alone is believed faster than spec from 9 sequences on" in lines
    assert "fast spec up 4 6+1, KV 25% 556 20 active, off, off 31%" in lines
    assert "latest 4 decisions: marginal 3, explore 1" in lines
    missed = "better role alone -10.0%, best fixed rule +0.4%, best split +2.0%"
    assert f"tokens missed, of the {missed}" in lines
    assert lines[-2:] == ["warning: dtype differs", "warning: they seem to share GPUs"]
    assert max(map(len, text.splitlines())) <= 100


def test_a_screen_says_what_an_operator_has_changed() -> None:
    told = deepcopy(TOLD)
    told["state"] |= {"stage": "draining", "settings_latest": False}
    told["state"]["policy"] |= {
        "name": "split",
        "override": {"policy": "split", "threshold": 4, "remaining_s": 90.0},
    }
    told["state"]["servers"][0]["drained"] = True
    lines = [" ".join(line.split()) for line in screen(URL, told).splitlines()]
    assert lines[1:4] == [
        "override: this policy at 4 for 1.5 min more, then marginal",
        "settings: the ones that were read last are wrong, see the log",
        "stage: draining, new requests are refused",
    ]
    assert any(line.startswith("fast spec up, drained 4") for line in lines)


def test_a_screen_of_a_router_that_knows_nothing() -> None:
    told = deepcopy(TOLD)
    told["model"] = {
        "crossover": None,
        "regret": {"o1": None, "o2": None, "o3": None},
        "servers": {name: {"windows": 0, "tpot": []} for name in ("fast", "wide")},
    }
    for each in told["state"]["servers"]:
        each["engine"] = None
    told["decisions"] = {"decisions": []}
    text = screen(URL, told)
    assert "crossover: not known yet" in text
    assert "tokens missed: not known yet" in text
    assert "nothing is measured yet" in text
    assert "latest 0 decisions: none" in text


@pytest.mark.parametrize("name", ["state", "model", "decisions"])
@pytest.mark.parametrize("value", [[], {}, None, "x"])
def test_an_answer_of_another_shape_is_told_in_one_line(name: str, value: object) -> None:
    with pytest.raises(StatusError) as caught:
        screen(URL, {**TOLD, name: value})
    assert "is it a router?" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_curves_cross_in_the_plot_where_they_cross() -> None:
    falling = Curve("s", [(1, 200.0), (16, 100.0), (256, 10.0)])
    level = Curve("b", [(1, 100.0), (256, 100.0)])
    lines = plot([falling, level])[:ROWS]
    assert len(lines) == ROWS
    assert {len(line) for line in lines} <= set(range(11 + COLUMNS))
    assert lines[0].strip().startswith("200 |s")
    starred = [at for line in lines for at, cell in enumerate(line) if cell == "*"]
    # A row is 18 tokens a second high, so that curves meet for some columns.
    middle = sum(starred) / len(starred) - lines[0].index("|") - 1
    assert middle == pytest.approx(COLUMNS / 2, abs=COLUMNS / 10)


def test_a_capital_marks_where_a_server_is_now() -> None:
    points = [(1.0, 100.0), (256.0, 10.0)]
    text = "\n".join(plot([Curve("s", points, now=16), Curve("b", points)]))
    assert text.count("S") == 1
    assert "B" not in text
    beyond = "\n".join(plot([Curve("s", points, now=10_000)]))
    assert beyond.count("S") == 1


def test_nothing_known_is_no_plot() -> None:
    assert plot([Curve("s", []), Curve("b", [])]) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_only() -> None:
    text = screen(URL, TOLD)
    assert coloured(text, io.StringIO(), {}) == text
    assert coloured(text, _Terminal(), {"NO_COLOR": "1"}) == text
    shown = coloured(text, _Terminal(), {"TERM": "xterm"})
    assert "\x1b[" in shown
    assert shown.splitlines()[0] == text.splitlines()[0]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            data = body or json.dumps(TOLD[name]).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_the_command_shows_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b"") as url:
        assert main(["status", "--url", url + "/"]) == 0
        shown = capsys.readouterr().out
        assert main(["status", "--url", url, "--json"]) == 0
    assert shown == screen(url, TOLD) + "\n"
    assert json.loads(capsys.readouterr().out) == TOLD


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(404, b"{}", "HTTP 404"), (200, b"<html>", "not JSON"), (200, b"[1]", "does not know")],
)
def test_what_is_no_router_is_told_in_one_line(
    status: int, body: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        assert main(["status", "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_router_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b"") as url:
        pass
    assert main(["status", "--url", url]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "nonsense"], "flag --url: 'nonsense' is not allowed, expected http://HOST:PORT"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_arguments_end_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *arguments]) == 2
    assert said in capsys.readouterr().err
