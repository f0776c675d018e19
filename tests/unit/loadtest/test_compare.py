import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.compare import main


def run(target: str, level: int, rates: list[float], ttft_ms: float = 10.0) -> dict[str, Any]:
    rounds = [{"tok_s": rate, "ttft_ms": {"p50": ttft_ms, "p99": None}} for rate in rates]
    return {"target": target, "concurrency": level, "tok_s": rates[0], "rounds": rounds}


def write(path: Path, runs: dict[str, Any], **more: Any) -> str:
    path.write_text(json.dumps({"schema": 1, "runs": runs} | more))
    return str(path)


@pytest.fixture(name="a")
def _a(tmp_path: Path) -> str:
    runs = {
        "spec@1": run("spec", 1, [100, 101, 99, 100]),
        "base@1": run("base", 1, [80, 81, 79, 80]),
        "base@8": run("base", 8, [400, 404, 396, 400]),
    }
    return write(tmp_path / "a.json", runs, setting={"model": "m"})


def test_a_loss_is_shown_with_its_interval_and_fails(
    a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write(tmp_path / "b.json", {"spec@1": run("spec", 1, [90, 91, 89, 90])})
    assert main([a, b, "--fail-below", "0.98", "--json"]) == 1
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["ratio"] == pytest.approx(0.9)
    assert 89 / 101 <= point["interval"][0] < 0.9 < point["interval"][1] <= 91 / 99
    assert (point["verdict"], point["below"]) == ("B is worse", True)
    assert main([a, b, "--fail-below", "0.85"]) == 0


def test_noise_shows_no_difference_and_is_said_to_be_noise(
    a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write(tmp_path / "b.json", {"spec@1": run("spec", 1, [96, 104, 92, 98])})
    assert main([a, b, "--fail-below", "0.98"]) == 0
    out = capsys.readouterr().out
    assert "no difference shown" in out
    assert "Too noisy to exclude a ratio below 0.98: spec@1" in out
    assert "Only A has: base@1, base@8." in out


def test_runs_of_one_round_are_compared_without_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.json", {"run": {"tok_s": 100.0}})
    b = write(tmp_path / "b.json", {"run": {"tok_s": 97.0}})
    assert main([a, b, "--fail-below", "0.98", "--json"]) == 1
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert (point["interval"], point["ratio"]) == (None, 0.97)
    assert main([a, b, "--fail-below", "0.95"]) == 0


def test_less_latency_is_a_ratio_above_one(
    a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write(tmp_path / "b.json", {"spec@1": run("spec", 1, [100] * 4, ttft_ms=5.0)})
    assert main([a, b, "--metric", "ttft_p50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["ratio"] == 2.0


def test_two_targets_of_one_file_are_compared_by_level(
    a: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a, a, "--a-target", "spec", "--b-target", "base", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(point["point"], point["ratio"]) for point in found["points"]] == [("1", 0.8)]
    assert found["only_b"] == ["8"]


def test_one_seed_gives_the_same_text(
    a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write(tmp_path / "b.json", {"spec@1": run("spec", 1, [96, 104, 92, 98, 101])})
    texts = set()
    for _ in range(2):
        main([a, b, "--seed", "5"])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no results file"),
        ('{"runs": {}}', "no schema"),
        ('{"schema": 2, "runs": {}}', "has schema 2; this version reads 1"),
        ('{"schema": 1, "runs": []}', "no runs to compare"),
        ('{"schema": 1, "runs": {"x": {}}}', "no point of"),
        ('{"schema": 1, "runs": {"spec@1": {"tok_s": "fast"}}}', "no point of"),
        ('{"schema": 1, "setting": {"model": "n"}, "runs": {}}', "measured 'm', "),
    ],
)
def test_a_file_that_cannot_be_compared_is_one_message(
    content: str, message: str, a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main([a, str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a-target", "spec"], "go together"),
        (["--a-target", "x", "--b-target", "spec"], "no target 'x', only: base, spec"),
        (["--fail-below", "0"], "must be above 0"),
    ],
)
def test_bad_options_are_one_message(
    words: list[str], message: str, a: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a, a, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_message(
    a: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a, "/nowhere.json"]) == 2
    assert "cannot read /nowhere.json: No such file" in capsys.readouterr().err
