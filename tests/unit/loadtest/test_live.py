import io

import pytest

from loadtest.live import Lines, Look, Rate, Screen, decisions, make_view
from loadtest.record import Progress, RequestRow, ServerProgress


def row(index: int, server: str | None) -> RequestRow:
    made = RequestRow(index, float(index), float(index), 10)
    made.server, made.reason = server, "split"
    return made


def look(elapsed_s: float = 1.0) -> Look:
    servers = {"": ServerProgress(2, 2, 0.0), "spec": ServerProgress(5, 9, 120.0)}
    progress = Progress(elapsed_s, 11, 4, 1, 7, servers)
    return Look("routed", 4, 4, 16.0, 0.8, 8, progress, 1234.0, [row(1, "spec")])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    view = make_view(stream)
    view.say("Run 4 of 4")
    view.show(look())
    view.show(look())
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Run 4 of 4"
    assert len(lines) == 2
    for words in ("routed (4/4)", "7 in flight", "in prefill 2, spec 5", "1,234 tok/s", "1 errors"):
        assert words in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_table_with_servers_and_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    view = make_view(stream)
    assert isinstance(view, Screen)
    view.show(look())
    view.close()
    shown = stream.getvalue()
    for words in (
        "routed",
        "1,234 tok/s",
        "in prefill",
        "2 in flight",
        "spec",
        "5 in flight",
        "to spec",
        "split",
    ):
        assert words in shown


def test_no_terminal_no_table() -> None:
    assert isinstance(make_view(io.StringIO()), Lines)


def test_a_rate_is_that_of_the_last_second_in_engine_time() -> None:
    rate = Rate(clock=2.0)
    rates = [rate.update(at / 4, 100.0 * at) for at in range(1, 13)]
    assert rates[-1] == pytest.approx(200.0)
    assert rate.update(3.25, 1200.0) < 200.0


def test_a_rate_is_never_negative() -> None:
    rate = Rate(clock=1.0)
    rate.update(0.5, 100.0)
    assert rate.update(1.0, 50.0) >= 0.0
    assert rate.update(1.6, 0.0) == 0.0


def test_the_latest_decisions_come_first_and_only_known_ones() -> None:
    rows = [row(i, "spec" if i % 2 else None) for i in range(30)]
    assert [r.index for r in decisions(rows)] == [29, 27, 25, 23, 21, 19]
