"""Runs a function before or after the first import of a module, wherever that import happens."""

from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class PatchingFinder(MetaPathFinder):
    """Finds the listed modules as Python would, and adds the patches to their loading."""

    def __init__(
        self,
        before: Mapping[str, Callable[[], None]],
        after: Mapping[str, Callable[[ModuleType], None]],
    ) -> None:
        self._before = before
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        before, after = self._before.get(fullname), self._after.get(fullname)
        if before is None and after is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_patched(module: ModuleType) -> None:
            if before is not None:
                before()
            execute(module)
            if after is not None:
                after(module)

        spec.loader.exec_module = execute_patched
        return spec
