import json
from pathlib import Path

import pytest

from loadtest.reading import Arrival, InputFileError, read_prompts, read_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder: Path, text: str) -> str:
    path = folder / "file"
    path.write_text(text)
    return str(path)


def test_a_trace_begins_at_its_first_arrival(tmp_path: Path) -> None:
    lines, reading = read_trace(write(tmp_path, AZURE))
    assert lines == [Arrival(0.0, 374, 44), Arrival(pytest.approx(4.314579, abs=1e-6), 396, 109)]
    assert reading.skipped == 0


def test_a_trace_may_have_seconds_and_any_order(tmp_path: Path) -> None:
    lines, _ = read_trace(write(tmp_path, "12.5,10,20\n10,30,40\n"))
    assert lines == [Arrival(0.0, 30, 40), Arrival(2.5, 10, 20)]


@pytest.mark.parametrize(
    "line", ["1,2", "1,2,3,4", "soon,1,2", "1,x,2", "1,0,2", "1,2,-3", "nan,1,1", "\0,1,1"]
)
def test_a_malformed_trace_line_is_left_out_counted_and_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f"{AZURE}{line}\n2023-11-16 18:16:00,5,6\n")
    lines, reading = read_trace(path)
    assert [a.output_tokens for a in lines] == [44, 109, 6]
    assert reading.skipped == 1
    assert reading.examples[0].startswith(f"{path}:4: ")


@pytest.mark.parametrize("read", [read_trace, read_prompts])
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_one_message(tmp_path: Path, read: object, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputFileError, match=f"{path} is empty; a line is"):
        read(path)  # type: ignore[operator]


def test_a_file_of_which_nothing_can_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"no line of .* can be used \(.*:1: "):
        read_trace(write(tmp_path, "a,b,c\n"))


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot read .*: No such file"):
        read_prompts(str(tmp_path / "none"))


OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a" * 40},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
    ],
    "max_tokens": 7,
}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello" * 8}]
}


def test_prompts_of_every_kind_are_read(tmp_path: Path) -> None:
    items = [OPENAI, SHAREGPT, {"prompt": "once"}, {"custom_id": "1", "body": OPENAI}]
    found, reading = read_prompts(write(tmp_path, "".join(json.dumps(i) + "\n" for i in items)))
    assert reading.skipped == 0
    assert [c.turns for c in found] == [("one", "two"), ("hi",), ("once",), ("one", "two")]
    assert [c.output_tokens for c in found] == [(10, 7), (10,), (None,), (10, 7)]
    assert [c.system for c in found] == ["Be brief.", None, None, "Be brief."]


def test_one_json_array_is_read_like_its_lines(tmp_path: Path) -> None:
    found, _ = read_prompts(write(tmp_path, json.dumps([SHAREGPT, {"prompt": "x"}], indent=1)))
    assert [c.turns for c in found] == [("hi",), ("x",)]


@pytest.mark.parametrize(
    "line",
    ["{", "[]]", "null", "{}", '{"messages": []}', '{"messages": [1]}', '{"prompt": ""}', "3"],
)
def test_a_malformed_prompt_is_left_out_counted_and_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n')
    found, reading = read_prompts(path)
    assert [c.turns for c in found] == [("a",), ("b",)]
    assert (reading.skipped, reading.examples[0][: len(path) + 3]) == (1, f"{path}:2:")
