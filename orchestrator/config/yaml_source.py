"""Reads YAML into plain data and remembers where every value came from: a line of the file, or an
override.

Does not cover `--set` itself (`load`) nor what the values mean (`schema`). Binary, huge, deeply
nested and exploding input and custom tags are refused in bounded time and memory, with the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from orchestrator.errors import ConfigError, Problem

#: Keys from the root down to a value; list items by their number.
KeyPath: TypeAlias = tuple[str, ...]
#: The file and its line, counted from 1; or the override as typed, `--set a.b=c`, and no line.
Place: TypeAlias = tuple[str, int | None]

#: A hand-written configuration has a few KiB; more is the wrong file.
MAX_FILE_BYTES = 1024 * 1024
#: The configuration has four levels; this bounds recursion far below Python's own limit.
MAX_DEPTH = 32
#: Keys and values, before and after aliases are expanded. A thousand nodes need about 30,000.
MAX_VALUES = 50_000

#: Text of the file (a tag, an alias, PyYAML's own words about them) is cut to this in a sentence.
_LONGEST_QUOTE = 160
#: Names of nodes in one sentence.
_MOST_LISTED = 12
_INIT = "python -m orchestrator init --output "
_START = "start from the cluster.yaml that comes with the program"

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str"))


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """Plain data with the origin of each part of it."""

    name: str
    data: Any
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    """Where each value was written; none of data that came from no text."""

    def problem(
        self, path: KeyPath, text: str, valid: str | None = None, parts: Iterable[KeyPath] = ()
    ) -> Problem:
        """Return a problem at `path`, placed at the nearest key above it that was written.

        `parts` are the values that a sum was made of: the last override among them is named.
        """
        wanted = set(parts)
        above = (path[:length] for length in range(len(path), -1, -1))
        place = next((self.places[key] for key in above if key in self.places), (self.name, None))
        typed = [place for key, place in self.places.items() if key in wanted and not place[1]]
        source, line = typed[-1] if typed else place
        return Problem(source, line, ".".join(path) or None, text, valid)


def read_yaml_file(path: str) -> YamlSource:
    """Read a file.

    `ConfigError` if it is missing, unreadable, too large, not text, not YAML, or empty.
    """
    missing = f"--config PATH with the path of a cluster.yaml, or write one: {_INIT}{path}"
    return read_yaml_text(read_text(path, "cluster.yaml", "--config PATH", missing), path)


def read_text(path: str, usual: str, typed: str, missing: str) -> str:
    """Return the text of a file that should hold YAML.

    `ConfigError` if it is missing, unreadable, too large, or not text. `usual` is what such a file
    is called, `typed` is how the user names one, and `missing` what may be typed if there is none.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise refusal(path, "no such file", missing) from None
    except IsADirectoryError:
        inside = f"{typed.removesuffix('PATH')}{path.rstrip('/')}/{usual}"
        raise refusal(path, "is a directory", inside) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        valid = f"{typed} with a file you may read"
        raise refusal(path, f"cannot be read: {reason}", valid) from None
    if len(raw) > MAX_FILE_BYTES:
        raise refusal(path, "is larger than 1 MiB", f"{typed} with a {usual}")
    if b"\0" in raw:
        raise refusal(path, "is a binary file", "a YAML text file in UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        valid = "the file saved again with the encoding UTF-8"
        raise refusal(path, "is not UTF-8 text", valid, line) from None


def read_yaml_text(text: str, name: str, empty: str = _START) -> YamlSource:
    """Read YAML `text`; `name` is what its problems are called after, `empty` what may be typed if
    there is nothing in it.

    Raises:
        ConfigError: not YAML, empty, or more than the limits of this module.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text, name)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _syntax_refusal(error, text, name) from None
    except (ValueError, OverflowError):
        # PyYAML hands an escape such as "\UFFFFFFFF" and the digits of %YAML to Python as they are.
        line = None if loader is None else loader.line + 1
        reason = "is not YAML: an escape or a version number in it is too large"
        valid = "characters up to \\U0010FFFF, and no %YAML line"
        raise refusal(name, reason, valid, line) from None
    if root is None:
        raise refusal(name, "is empty", empty)
    walk = _Walk(name)
    return YamlSource(name=name, data=walk.value(root, ()), places=walk.places)


class _Loader(yaml.SafeLoader):
    """Composes nodes within `MAX_DEPTH` and `MAX_VALUES`; dates and `=` are text.

    The pure-Python loader: its recursion is ours to bound.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, form) for tag, form in resolvers if tag in _PLAIN_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._source = name
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_VALUES:
            text = f"has more than {MAX_VALUES} keys and values"
            if self._depth > MAX_DEPTH:
                text = f"is nested deeper than {MAX_DEPTH} levels"
            event = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it bare
            raise refusal(self._source, text, None, event.start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Walk:
    """Turns composed nodes into plain data and notes the line of each."""

    def __init__(self, name: str) -> None:
        self.places: dict[KeyPath, Place] = {}
        self._name = name
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        """Return the plain value of `node`; `ConfigError` for what is no plain value."""
        line = node.start_mark.line + 1
        _, line = self.places.setdefault(path, (self._name, line))
        self._values += 1
        if self._values > MAX_VALUES:  # aliases make a small text a large tree
            text = f"has more than {MAX_VALUES} values once aliases (*name) are expanded"
            raise refusal(self._name, text, None, line)
        if len(path) > MAX_DEPTH:
            text = "has an alias (*name) inside the value it stands for"
            raise refusal(self._name, text, None, line)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, str(n))) for n, item in enumerate(node.value)]
        return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._key(key_node, path, line)
            if key in found:
                text = f"is given twice, on line {self.places[*path, key][1]} and on line {line}"
                raise self._refusal(line, (*path, key), text, "one of the two")
            self.places[*path, key] = (self._name, line)
            found[key] = self.value(value_node, (*path, key))
        return found

    def _key(self, node: yaml.Node, path: KeyPath, line: int) -> str:
        if not isinstance(node, yaml.ScalarNode):
            text = "has a list or a mapping as a key"
            raise self._refusal(line, path, text, "a word as the key")
        if node.tag != _TAG + "str":
            text = f"has the key {node.value[:60] or '(nothing)'}, which is not text"
            valid = f'the key in quotes: "{cut(node.value)}"'
            valid = valid if node.tag in _PLAIN_TAGS else "a word as the key"
            raise self._refusal(line, path, text, valid)
        if node.value == "<<":
            raise self._refusal(line, path, "has a merge key <<", "the keys written out")
        return str(self._scalar(node, (*path, node.value), line))

    def _scalar(self, node: yaml.Node, path: KeyPath, line: int | None) -> object:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
            tag = cut(str(node.tag).replace(_TAG, "!!"))
            raise self._refusal(line, path, f"has the tag {tag}", "plain values, without tags")
        try:
            node.value.encode("utf-8")
            # YAML 1.1 would read 1:30 as 90.
            is_text = node.tag == _TAG + "str" or ":" in node.value
            return node.value if is_text else self._constructor.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
            text = f"{node.value[:60]!r} cannot be read as {node.tag.removeprefix(_TAG)}"
            valid = "the value in quotes if it is text"
            raise self._refusal(line, path, text, valid) from None

    def _refusal(self, line: int | None, path: KeyPath, text: str, valid: str) -> ConfigError:
        return ConfigError([Problem(self._name, line, ".".join(path) or None, text, valid)])


def cut(text: str) -> str:
    """Return `text` of the file, shortened where it would make the sentence around it too long."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Return the first names of the file, joined by commas, and how many more there are."""
    every: Sequence[str] = list(names)
    shown = ", ".join(cut(name) for name in every[:_MOST_LISTED])
    return shown if len(every) <= _MOST_LISTED else f"{shown} and {len(every) - _MOST_LISTED} more"


def refusal(source: str, text: str, valid: str | None, line: int | None = None) -> ConfigError:
    """Return the error for one problem of a whole source, or of a line of it."""
    return ConfigError([Problem(source, line, None, text, valid)])


def _syntax_refusal(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    """Return the error for text that is not YAML, at the line where reading stopped."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position].count("\n")
        return refusal(name, "holds a control character", "printable text", before + 1)
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    line = None if mark is None else mark.line + 1
    if "single document" in str(getattr(error, "context", None)):
        valid = "one document, without a --- line between two parts"
        return refusal(name, "holds a second document", valid, line)
    tabs = "spaces for indentation; tabs are not allowed" if "'\\t'" in str(problem) else None
    return refusal(name, "is not YAML" + (f": {cut(problem)}" if problem else ""), tabs, line)
