"""A YAML file as values that know their lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import yaml

from router.bounded_file import FileError, read_bytes

FILE_BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The parsed file. `lines` maps a key path, such as `servers[1].url`, to its line."""

    path: str
    values: Mapping[str, object]
    lines: Mapping[str, int]

    def where(self, key_path: str) -> str:
        """Name a place in the file."""
        return f"{self.path}:{self.lines[key_path]} {key_path}"


class _Loader(yaml.SafeLoader):
    """YAML without aliases: a few lines of them can name any amount of data."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
            mark = cast("yaml.error.Mark", event.start_mark)
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


def read_file(path: str) -> YamlFile:
    """Read and parse `path`. FileError on anything but a mapping of settings."""
    text = _read_text(path)
    try:
        return _parse(path, text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise FileError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise FileError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise FileError(f"{path}: nested too deeply") from error


def _parse(path: str, text: str) -> YamlFile:
    lines: dict[str, int] = {}
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return YamlFile(path, {}, lines)
        # A set, `!!set {a, b}`, is a mapping node too.
        if not isinstance(root, yaml.MappingNode) or not root.tag.endswith(":map"):
            raise FileError(f"{path}: expected settings as 'key: value' lines")
        _note_lines(path, root, "", lines)
        return YamlFile(path, loader.construct_document(root), lines)
    finally:
        loader.dispose()


def _read_text(path: str) -> str:
    data = read_bytes(path, FILE_BYTES_MAX)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text") from error


def _note_lines(path: str, node: yaml.Node, key_path: str, lines: dict[str, int]) -> None:
    """Fill `lines` for everything below `node`; a key that is there twice is an error."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note(path, item, f"{key_path}[{index}]", item.start_mark.line + 1, lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                raise FileError(f"{path}:{line}: a key must be text")
            child = f"{key_path}.{key.value}" if key_path else key.value
            if child in lines:
                raise FileError(f"{path}:{line} {child}: set twice, first at line {lines[child]}")
            _note(path, value, child, line, lines)


def _note(path: str, node: yaml.Node, key_path: str, line: int, lines: dict[str, int]) -> None:
    lines[key_path] = line
    _note_lines(path, node, key_path, lines)
