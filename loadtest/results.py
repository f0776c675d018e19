"""The results file: schema 1, one entry per run."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

SCHEMA = 1
_NUMBERS = re.compile(r"\[\n[^\[\]{}\"]*\]")


class OutputError(Exception):
    """The results cannot be written where the user wants them."""


def document(
    runs: Mapping[str, Mapping[str, object]], provenance: Mapping[str, object]
) -> dict[str, object]:
    """Return the results document."""
    return {"schema": SCHEMA, "runs": dict(runs), "provenance": dict(provenance)}


def check_writable(path: str) -> None:
    """Raise OutputError now, not after the run, if `path` cannot be written; `-` is stdout."""
    if path == "-":
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


def check_folder(folder: Path) -> None:
    """Raise OutputError now, not after the run, if no file can be made in `folder`."""
    probe = folder / ".writable"
    check_writable(str(probe))
    probe.unlink()


def write(path: str, results: Mapping[str, object]) -> None:
    """Write the document to a file, or to stdout if `path` is `-`."""
    text = json.dumps(results, indent=2) + "\n"
    # A series of numbers takes one line.
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    if path == "-":
        sys.stdout.write(text)
        return
    write_text(Path(path), text)


def write_text(path: Path, text: str) -> None:
    """Write a text file; OutputError if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
