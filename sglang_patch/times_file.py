"""Step times on disk: measured once for what they depend on, and read again."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from sglang_patch.step_times import StepTimes

SCHEMA = 1
Key = Mapping[str, object]


def cache_path(key: Key, folder: str | None, environ: Mapping[str, str]) -> Path:
    """Return where times that depend on `key` are kept."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/tmp") / ".cache")  # noqa: S108
    text = json.dumps([SCHEMA, key], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return Path(folder or Path(home) / "crossover") / f"step-times-{name}.json"


def read_times(path: Path) -> StepTimes:
    """Read a file. OSError if there is none, ValueError, which names it, if it holds no times."""
    try:
        return StepTimes.load(json.loads(path.read_text(encoding="utf-8"))["times"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no step times: {error}") from None


def write_times(path: Path, key: Key, times: StepTimes) -> None:
    """Replace the file as a whole; OSError where that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "key": key, "times": times.dump()}, indent=1)
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)
