"""Compares the hook table with the installed SGLang, by reading its source: nothing of it is
imported.

`python -m sglang_patch.compat` prints the comparison; exit 1 on a mismatch or without SGLang.
"""

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sglang_patch.hooks import TABLE, Hook, Kind

TESTED_VERSIONS = ("0.5.12.post1",)

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Installed:
    """The SGLang of this environment: its version, and the folder that holds its top package."""

    version: str
    folder: Path


def find_installed() -> Installed | None:
    """Return the installed SGLang, None if there is none."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "unknown"
    return Installed(found, Path(next(iter(spec.submodule_search_locations))).parent)


def problems(installed: Installed | None, table: Iterable[Hook] = TABLE) -> tuple[str, ...]:
    """Return what keeps the plugin from working with this SGLang, most telling first."""
    if installed is None:
        return ("SGLang is not installed",)
    found = (
        []
        if installed.version in TESTED_VERSIONS
        else [f"SGLang {installed.version} is untested (tested: {', '.join(TESTED_VERSIONS)})"]
    )
    return (*found, *mismatches(installed, table))


def mismatches(installed: Installed | None, table: Iterable[Hook]) -> tuple[str, ...]:
    """Return what is wrong with rows of the table, whatever the version."""
    if installed is None:
        return ()
    return tuple(problem for row in table if (problem := check(row, installed.folder)))


def check(row: Hook, folder: Path) -> str | None:
    """Return what is wrong with one row, None if it agrees."""
    tree = _parse(folder, row.module)
    if tree is None:
        return f"{row.path}: there is no module {row.module}"
    node = _find(tree, row.target.partition(":")[2].split("."))
    if node is None:
        return f"{row.path}: not defined"
    if row.kind is Kind.FIELDS:
        actual = _fields(node)
    elif isinstance(node, ast.ClassDef):
        return f"{row.path}: is a class, not a function"
    else:
        actual = _parameters(node)
    if row.kind is Kind.HOOK:
        agrees = actual == row.parameters
    else:
        agrees = set(row.parameters) <= set(actual)
    if agrees:
        return None
    return f"{row.path}: has ({', '.join(actual)}), not ({', '.join(row.parameters)})"


@cache
def _parse(folder: Path, module: str) -> ast.Module | None:
    path = folder.joinpath(*module.split("."))
    for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
        if file.is_file():
            return _with_star_imports(ast.parse(file.read_text(encoding="utf-8")), folder)
    return None


def _with_star_imports(tree: ast.Module, folder: Path) -> ast.Module:
    """Add what a package takes over whole (`from x import *`), as sglang.srt.utils does."""
    for node in list(tree.body):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and node.names[0].name == "*"
        ):
            other = _parse(folder, node.module)
            tree.body.extend(other.body if other else ())
    return tree


def _find(tree: ast.Module, names: list[str]) -> Node | None:
    body: list[ast.stmt] = tree.body
    found: Node | None = None
    for name in names:
        found = next((n for n in body if isinstance(n, Node) and n.name == name), None)
        if found is None:
            return None
        body = found.body
    return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    arguments = node.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _fields(node: Node) -> tuple[str, ...]:
    return tuple(
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def report(installed: Installed | None, table: Iterable[Hook] = TABLE) -> str:
    """Return the comparison as text, one line a row."""
    if installed is None:
        return "SGLang is not installed in this environment: nothing to compare."
    lines = [f"SGLang {installed.version} in {installed.folder}", ""]
    for row in table:
        problem = check(row, installed.folder)
        mark = "ok" if problem is None else "MISMATCH"
        lines.append(
            f"{mark:9}{row.role:10}{row.kind:7}{row.path}({', '.join(row.parameters)})  # {row.why}"
        )
    found = problems(installed, table)
    lines += ["", *(f"- {problem}" for problem in found)] if found else ["", "All names agree."]
    return "\n".join(lines)


def main() -> int:
    """Print the comparison; 0 if the plugin can work here."""
    installed = find_installed()
    print(report(installed))
    return 1 if problems(installed) else 0


if __name__ == "__main__":
    sys.exit(main())
