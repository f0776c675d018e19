"""A file that somebody names, as bytes, and no more of them than are allowed."""

from pathlib import Path


class FileError(Exception):
    """The file is of no use. The text is for the user; it names the file, and the line if known."""


def read_bytes(path: str, bytes_max: int) -> bytes:
    """Return what is in a file; FileError if it cannot be read, or has more than `bytes_max`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"{path}: cannot be read: {reason}") from error
    if len(data) > bytes_max:
        raise FileError(f"{path}: expected {bytes_max} bytes at most")
    return data
