import json
from pathlib import Path

import pytest

from loadtest.provenance import provenance, redact
from loadtest.results import OutputError, check_writable, document, write


def test_the_document_has_the_schema_and_the_runs() -> None:
    assert document({"routed": {"tokens": 1}}, {"seed": 1}) == {
        "schema": 1,
        "runs": {"routed": {"tokens": 1}},
        "provenance": {"seed": 1},
    }


@pytest.mark.parametrize("words", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_a_key_does_not_get_into_the_results(words: list[str]) -> None:
    assert "sk-1" not in redact(["crossover-loadtest", "run", *words, "--seed", "1"])
    assert "sk-1" not in json.dumps(provenance(words, 1))


def test_the_provenance_says_what_it_takes_to_repeat_a_run() -> None:
    made = provenance(["crossover", "demo"], 7, clock=8.0, engines=("a", "b"))
    assert made["command"] == "crossover demo"
    assert (made["seed"], made["clock"], made["engines"]) == (7, 8.0, ["a", "b"])
    assert set(made) >= {"commit", "dirty", "host", "python", "packages"}
    json.dumps(made)


def test_a_file_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"):
        check_writable(str(tmp_path / "file" / "results.json"))
    with pytest.raises(OutputError, match="cannot write"):
        check_writable(str(tmp_path))


def test_results_are_written_to_a_new_folder_or_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "new" / "results.json")
    check_writable(path)
    write(path, {"schema": 1, "series": [1, 2.5, None]})
    assert json.loads(Path(path).read_text()) == {"schema": 1, "series": [1, 2.5, None]}
    assert len(Path(path).read_text().splitlines()) == 4
    check_writable("-")
    write("-", {"schema": 1})
    assert json.loads(capsys.readouterr().out) == {"schema": 1}
