"""Reads YAML into plain data and remembers where every value came from: a line of the file, or an
override.

Does not cover `--set` itself (`load`) nor what the values mean (`schema`). Hostile input (binary,
huge, deeply nested, exploding aliases, custom tags) is refused in bounded time and memory, with the
line.
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

#: A hand-written configuration has a few KiB; more is the wrong file.
MAX_FILE_BYTES = 1024 * 1024
#: The configuration has four levels; this bounds recursion far below Python's own limit.
MAX_DEPTH = 32
#: Keys and values, before and after aliases are expanded. A thousand nodes need about 30,000.
MAX_VALUES = 50_000

#: Text that came from the file (a tag, an alias, PyYAML's own words about them) is cut to this in a
#: sentence.
_LONGEST_QUOTE = 160
_INIT = "python -m orchestrator init --output "
_START = "start from the cluster.yaml that comes with the program"
_MOST_LISTED = 12
"""Names of nodes in one sentence."""

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(
    _TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """Plain data with the origin of each part of it."""

    name: str
    data: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of each key in the file, counted from 1; none of data that came from no text."""
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)
    """Each overridden path with the override as typed, `--set a.b=c`; the later of two comes last.
    """
    problems: tuple[Problem, ...] = ()
    """Errors in the text that did not prevent reading the rest."""

    def problem(
        self, path: KeyPath, text: str, valid: str | None, related: Sequence[KeyPath] = ()
    ) -> Problem:
        """Return a problem at `path`, placed at its override or at the nearest line of the file.

        `related` are the paths that a sum was made of: an override among them is the likelier
        cause, so it is named.
        """
        # A key that the file does not have was made by an override of something below it.
        made = path not in self.lines
        culprits = [
            typed
            for where, typed in self.overrides.items()
            if where in related or (made and where[: len(path)] == path)
        ]
        name, line = self.name, None
        for where in (path[:length] for length in range(len(path) + 1)):
            if where in self.lines:
                name, line = self.name, self.lines[where]
            if where in self.overrides:
                name, line = self.overrides[where], None
        if culprits:
            name, line = culprits[-1], None
        return Problem(name, line, ".".join(path) or None, text, valid)


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
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refusal(
            path, f"cannot be read: {reason}", f"{typed} with a file you may read"
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise refusal(path, "is larger than 1 MiB", f"{typed} with a {usual}")
    if b"\0" in raw:
        raise refusal(path, "is a binary file", "a YAML text file in UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise refusal(
            path, "is not UTF-8 text", "the file saved again with the encoding UTF-8", line
        ) from None


def read_yaml_text(text: str, name: str, empty: str = _START) -> YamlSource:
    """Read YAML `text`; `name` is what its problems are called after, `empty` what may be typed if
    there is nothing in it.

    Raises:
        ConfigError: not YAML, empty, or more than the limits of this module.
    """
    loader: _GuardedLoader | None = None
    try:
        loader = _GuardedLoader(text, name)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _syntax_refusal(error, text, name) from None
    except (ValueError, OverflowError):
        # PyYAML hands an escape such as "\UFFFFFFFF" and the digits of %YAML to Python as they are.
        line = None if loader is None else loader.line + 1
        reason = "is not YAML: an escape or a version number in it is too large"
        raise refusal(
            name, reason, "characters up to \\U0010FFFF, and no %YAML line", line
        ) from None
    if root is None:
        raise refusal(name, "is empty", empty)
    walk = _Walk(name)
    data = walk.value(root, (), 0)
    return YamlSource(name=name, data=data, lines=walk.lines, problems=tuple(walk.problems))


class _GuardedLoader(yaml.SafeLoader):
    """Composes nodes within `MAX_DEPTH` and `MAX_VALUES`.

    The pure-Python loader: its recursion is ours to bound.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._source = name
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        too_much = (
            f"has more than {MAX_VALUES} keys and values" if self._nodes > MAX_VALUES else None
        )
        if self._depth > MAX_DEPTH:
            too_much = f"is nested deeper than {MAX_DEPTH} levels"
        if too_much is not None:
            event = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it bare
            raise refusal(self._source, too_much, None, event.start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Walk:
    """Turns composed nodes into plain data, noting lines and problems on the way."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._name = name
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: KeyPath, depth: int) -> object:
        """Return the plain value of `node`."""
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._values += 1
        # Aliases make a small text a large tree, or an endless one.
        if self._values > MAX_VALUES:
            text = f"has more than {MAX_VALUES} values once aliases (*name) are expanded"
            raise refusal(self._name, text, None, line)
        if depth > MAX_DEPTH:
            raise refusal(
                self._name, "has an alias (*name) inside the value it stands for", None, line
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [
                self.value(item, (*path, str(n)), depth + 1) for n, item in enumerate(node.value)
            ]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in found:
                text = f"is given twice, on line {first_lines[key]} and on line {line}"
                self._note(line, (*path, key), text, "one of the two")
                continue
            first_lines[key] = line
            self.lines[(*path, key)] = line
            found[key] = self.value(value_node, (*path, key), depth + 1)
        return found

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        line = node.start_mark.line + 1
        if node.tag == _TAG + "merge":
            self._note(line, path, "has a merge key <<", "the keys written out")
        elif not isinstance(node, yaml.ScalarNode):
            self._note(line, path, "has a list or a mapping as a key", "a word as the key")
        elif node.tag != _TAG + "str":
            valid = (
                f'the key in quotes: "{cut(node.value)}"'
                if node.tag in _SCALAR_TAGS
                else "a word as the key"
            )
            self._note(
                line,
                path,
                f"has the key {node.value[:60] or '(nothing)'}, which is not text",
                valid,
            )
        else:
            text = self._scalar(node, (*path, node.value))
            return text if isinstance(text, str) else None
        return None

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        line = self.lines.get(path, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            tag = cut(str(node.tag).replace(_TAG, "!!"))
            self._note(line, path, f"has the tag {tag}", "plain values, without tags")
            return None
        try:
            node.value.encode("utf-8")
            # No key is a date, and YAML 1.1 would read 1:30 as 90: such keys are read as text.
            is_text = node.tag in (_TAG + "str", _TAG + "timestamp") or ":" in node.value
            return node.value if is_text else self._constructor.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
            kind = node.tag.removeprefix(_TAG)
            self._note(
                line,
                path,
                f"{node.value[:60]!r} cannot be read as {kind}",
                "the value in quotes if it is text",
            )
            return None

    def _note(self, line: int, path: KeyPath, text: str, valid: str | None) -> None:
        self.problems.append(Problem(self._name, line, ".".join(path) or None, text, valid))


def cut(text: str) -> str:
    """Return `text` of the file, shortened where it would make the sentence around it too long."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Return the first names of the file, joined by commas, and how many more there are."""
    every = list(names)
    shown = ", ".join(cut(name) for name in every[:_MOST_LISTED])
    return shown if len(every) <= _MOST_LISTED else f"{shown} and {len(every) - _MOST_LISTED} more"


def refusal(source: str, text: str, valid: str | None, line: int | None = None) -> ConfigError:
    """Return the error for one problem of a whole source, or of a line of it."""
    return ConfigError([Problem(source, line, None, text, valid)])


def _syntax_refusal(error: yaml.YAMLError, text: str, name: str) -> ConfigError:
    """Return the error for text that is not YAML, at the line where reading stopped."""
    line, reason, valid = None, "is not YAML", None
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line + 1
        reason = f"is not YAML: {cut(str(error.problem))}"
        if "'\\t'" in str(error.problem):
            valid = "spaces for indentation; tabs are not allowed"
        elif isinstance(error, yaml.composer.ComposerError) and "single document" in str(
            error.context
        ):
            reason, valid = (
                "holds a second document",
                "one document, without a --- line between two parts",
            )
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        reason, valid = "holds a control character", "printable text"
    return refusal(name, reason, valid, line)
