"""Borrow attributes of SGLang's objects for the length of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def swapped(target: object, **values: object) -> Iterator[None]:
    """Set attributes of `target`, and put the earlier values back whatever happens."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
