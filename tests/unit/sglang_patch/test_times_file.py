from pathlib import Path

import pytest

from sglang_patch.step_times import Curve, StepTimes
from sglang_patch.times_file import cache_path, read_times, write_times

TIMES = StepTimes(Curve((1, 8), (0.01, 0.02), 1e-7), Curve((1,), (0.005,)))
KEY = {"model": "m", "device": "GPU"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.json"
    write_times(path, KEY, TIMES)
    assert read_times(path) == TIMES
    assert [each.name for each in path.parent.iterdir()] == ["times.json"]


def test_what_times_depend_on_names_the_file(tmp_path: Path) -> None:
    paths = {
        cache_path(key, str(tmp_path), {}) for key in (KEY, {**KEY, "device": "another GPU"}, KEY)
    }
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("folder", "environ", "expected"),
    [
        ("/given", {"HOME": "/home/me"}, "/given"),
        (None, {"HOME": "/home/me"}, "/home/me/.cache/crossover"),
        (None, {"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"}, "/cache/crossover"),
    ],
)
def test_files_are_kept_in_the_users_cache(
    folder: str | None, environ: dict[str, str], expected: str
) -> None:
    assert cache_path(KEY, folder, environ).parent == Path(expected)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"times": {"on": 1}}'])
def test_a_file_of_something_else_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"times\.json holds no step times"):
        read_times(path)
