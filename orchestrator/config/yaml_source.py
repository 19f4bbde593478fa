"""Reads YAML into plain data and remembers where every value came from: a line of the file, or an
override.

Does not cover `--set` itself (`load`) nor what the values mean (`schema`). Binary, huge and deeply
nested input, aliases and custom tags are refused in bounded time and memory, with the line.
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
#: Keys and values.
MAX_VALUES = 50_000

#: Names of nodes in one sentence.
_MOST_LISTED = 12
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


def read_text(path: str, valid: str, if_missing: str = "") -> str:
    """Return the text of a file that should hold YAML.

    `ConfigError` if it is missing, unreadable, too large, or not text. `valid` is what may be typed
    to name another file, `if_missing` what else is said if there is none.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise refusal(path, "no such file", valid + if_missing) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise refusal(path, f"cannot be read: {reason}", valid) from None
    if len(raw) > MAX_FILE_BYTES:
        raise refusal(path, "is larger than 1 MiB", valid)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = "the file saved again with the encoding UTF-8"
        raise refusal(path, "is not UTF-8 text", what, line) from None


def read_yaml_text(text: str, name: str, empty: str = _START) -> YamlSource:
    """Read YAML `text`; `name` is what its problems are called after, `empty` what may be typed if
    there is nothing in it.

    Raises:
        ConfigError: not YAML, empty, or more than the limits of this module.
    """
    line: int | None = None
    try:
        reader = _Reader(text, name)
        try:
            root = reader.get_single_node()
        finally:
            line = reader.line + 1
    except yaml.YAMLError as error:
        said = [getattr(error, words, None) for words in ("context", "problem", "reason")]
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
        line = line if mark is None else mark.line + 1
        if isinstance(position, int):  # of a control character
            line = text.count("\n", 0, position) + 1
        raise refusal(name, f"is not YAML: {', '.join(filter(None, said))}", None, line) from None
    except (ValueError, OverflowError):
        # PyYAML hands an escape such as "\UFFFFFFFF" and the digits of %YAML to Python as they are.
        reason = "is not YAML: an escape or a version number in it is too large"
        raise refusal(name, reason, "characters up to \\U0010FFFF", line) from None
    if root is None:
        raise refusal(name, "is empty", empty)
    return YamlSource(name=name, data=reader.plain(root), places=reader.places)


class _Reader(yaml.SafeLoader):
    """Composes nodes within `MAX_DEPTH` and `MAX_VALUES`, and makes plain data of them.

    Dates, `=` and `<<` are text, and so is every key. This is the pure-Python loader: its recursion
    is ours to bound.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, form) for tag, form in resolvers if tag in _PLAIN_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.places: dict[KeyPath, Place] = {}
        self._source = name
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        event = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it bare
        faults = {
            f"is nested deeper than {MAX_DEPTH} levels": self._depth > MAX_DEPTH,
            f"has more than {MAX_VALUES} keys and values": self._nodes > MAX_VALUES,
            "has an alias (*name)": isinstance(event, yaml.AliasEvent),
        }
        for text in (text for text, is_so in faults.items() if is_so):
            raise refusal(self._source, text, "what it stands for", event.start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain(self, node: yaml.Node, path: KeyPath = (), line: int | None = None) -> object:
        """Return the plain value of `node`, and note its line or that of its key.

        `ConfigError` for what is no plain value.
        """
        line = _line_of(node) if line is None else line
        self.places[path] = (self._source, line)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.plain(item, (*path, str(n))) for n, item in enumerate(node.value)]
        return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = _line_of(key_node)
            self._scalar(key_node, path, line)
            at = (*path, str(key_node.value))
            if at[-1] in found:
                text = f"is given twice, on line {self.places[at][1]} and on line {line}"
                raise refusal(self._source, text, "one of the two", line, at)
            found[at[-1]] = self.plain(value_node, at, line)
        return found

    def _scalar(self, node: yaml.Node, path: KeyPath, line: int) -> object:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
            text = f"has the tag {str(node.tag).replace(_TAG, '!!')}, or a list or mapping as a key"
            raise refusal(self._source, text, "plain words and values", line, path)
        try:
            node.value.encode("utf-8")
            # YAML 1.1 would read 1:30 as 90.
            is_text = node.tag == _TAG + "str" or ":" in node.value
            return node.value if is_text else self.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
            text = f"{node.value[:60]!r} cannot be read as {node.tag.removeprefix(_TAG)}"
            valid = "the value in quotes if it is text"
            raise refusal(self._source, text, valid, line, path) from None


def _line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def listed(names: Iterable[str]) -> str:
    """Return the first names of the file, joined by commas, and how many more there are."""
    every: Sequence[str] = list(names)
    shown = ", ".join(every[:_MOST_LISTED])
    return shown if len(every) <= _MOST_LISTED else f"{shown} and {len(every) - _MOST_LISTED} more"


def refusal(
    source: str, text: str, valid: str | None, line: int | None = None, path: KeyPath = ()
) -> ConfigError:
    """Return the error for one problem of a whole source, of a line of it, or of a key."""
    return ConfigError([Problem(source, line, ".".join(path) or None, text, valid)])
