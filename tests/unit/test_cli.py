"""The command `crossover`: what it prints, where, and what it exits with."""

import os
import socket
from pathlib import Path

import pytest

from router.cli import main, printed, start_warnings
from router.configuration import resolve
from router.options import OPTIONS

TWO = ["--spec-url", "http://127.0.0.1:1", "--base-url", "http://127.0.0.1:2"]
TWO_FLAGS = {"spec_url": ["http://127.0.0.1:1"], "base_url": ["http://127.0.0.1:2"]}
SCREEN_LINES = 40
SCREEN_COLUMNS = 100


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CROSSOVER_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_fits_on_a_screen_and_has_examples(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= SCREEN_LINES
    assert "crossover serve --spec-url http" in out


@pytest.mark.parametrize("command", ["serve", "check-config", "doctor"])
def test_help_of_a_command_fits_on_a_screen_and_has_the_common_flags_and_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown_help([command, "--help"], capsys)
    assert len(out.splitlines()) <= SCREEN_LINES
    assert max(map(len, out.splitlines())) <= SCREEN_COLUMNS
    for option in OPTIONS:
        assert (option.flag in out.split()) is option.common
    assert "(30000)" in out
    assert "--help-all" in out
    assert f"crossover {command} --spec-url http" in out


def test_help_all_has_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown_help(["serve", "--help-all"], capsys)
    assert max(map(len, out.splitlines())) <= SCREEN_COLUMNS
    for option in OPTIONS:
        assert (option.flag in out.split()) is option.in_flags
        assert not option.has_default or f"({option.shown_default})" in " ".join(out.split())


def shown_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_good_settings_are_said_to_be_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", *TWO]) == 0
    assert "spec (spec) http://127.0.0.1:1, base (base)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["srve"], ["command srve: unknown, did you mean serve?"]),
        (["serve", *TWO, "--prot", "5"], ["flag --prot: unknown, did you mean --port?"]),
        (["serve", *TWO, "--workers=4"], ["flag --workers: not supported: one process"]),
        (["serve", *TWO, "--thresh", "4"], ["flag --thresh: unknown, did you mean --threshold?"]),
        (["serve", *TWO, "more"], ["argument 'more': expected flags only"]),
        (["serve", *TWO, "--port"], ["argument --port: expected one argument"]),
        (["serve", "--port", "x", "--wat"], ["flag --wat", "flag --port: 'x'", "no servers"]),
    ],
)
def test_bad_input_is_told_on_stderr_with_exit_2(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith("crossover: ")
        assert text in line


def test_a_key_on_the_command_line_is_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", *TWO, "--api-key", "hunter2"]) == 2
    assert main(["serve", *TWO, "--admin-key=hunter2"]) == 2
    assert "hunter2" not in capsys.readouterr().err


def test_a_port_in_use_and_a_bad_host_are_one_message_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", *TWO, "--port", port]) == 2
    assert main(["serve", *TWO, "--host", "no.such.host.invalid", "--port", "0"]) == 2
    in_use, bad_host = capsys.readouterr().err.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in in_use
    assert "port: flag --port" in in_use
    assert "cannot listen on no.such.host.invalid:0: " in bad_host


def test_print_config_gives_a_file_that_gives_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("hunter2")
    flags = ["--threshold", "4", "--host", "::1", "--admin-key-file", str(key)]
    assert main(["serve", *TWO, *flags, "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "***" in out
    assert "threshold: 4  # flag --threshold" in out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    given = {"threshold": ["4"], "host": ["::1"], "admin_key_file": [str(key)], **TWO_FLAGS}
    assert resolve({"config": [str(again)]}, {}).settings == resolve(given, {}).settings


def test_print_config_keeps_names_and_gpus(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "servers:\n"
        "  - {name: a, role: spec, url: 'http://h:1', gpus: [0]}\n"
        "  - {name: b, role: base, url: 'http://h:2', gpus: [1]}\n"
    )
    first = resolve({"config": [str(file)]}, {})
    file.write_text(printed(first))
    assert resolve({"config": [str(file)]}, {}).settings == first.settings


def test_only_a_threshold_that_nobody_chose_is_warned_of() -> None:
    by_threshold = {**TWO_FLAGS, "policy": ["threshold"]}
    assert "was not measured" in start_warnings(resolve(by_threshold, {}))[0]
    assert start_warnings(resolve({**by_threshold, "threshold": ["8"]}, {})) == []
    assert start_warnings(resolve(TWO_FLAGS, {})) == []


def test_a_threshold_that_the_policy_ignores_is_warned_of() -> None:
    (warning,) = start_warnings(resolve({**TWO_FLAGS, "threshold": ["16"]}, {}))
    assert "flag --threshold: threshold 16 does nothing with policy marginal" in warning
