"""Reads cluster.yaml with its overrides (`--set a.b=value`) into a `Config`, and writes a `Config`
as text again. Every refusal names the file, its line and the key.

Refusals of plain data have pydantic's words, unless these name no key or no form that may be typed.
Binary, huge and deeply nested input, aliases and custom tags are refused in bounded time and
memory, with the line. `read_yaml_text` and `checked` serve every other file that is read into a
model. Does not cover the models (`schema`). Every function that reads raises `ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from yaml.reader import ReaderError

from orchestrator.config import team
from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import MAX_WORKERS_PER_CARD, VALID_NODE_NAME, Config, NodeConfig
from orchestrator.errors import ConfigError, Problem, in_words
from workers.training.settings import RemovedKeyError

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

#: Most names of nodes in one sentence.
_MOST_LISTED = 12
_START = "start from the cluster.yaml that comes with the program"

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str"))

#: Our words for types of pydantic's errors whose own words do not help the author of a file.
_WORDS = {
    "missing": "is missing",
    "dict_type": "{value} should be a mapping",
    "model_type": "{value} should be a mapping",
    "string_pattern_mismatch": "{value} is not in the right form",
}
#: More sentences mean that it is the wrong file, and would push the first ones off the screen.
MAX_PROBLEMS = 100

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """Plain data with the origin of each part of it."""

    name: str
    data: Any
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    """Where each value was written; empty for data that came from no text."""

    def problem(
        self, path: KeyPath, text: str, valid: str | None = None, parts: Collection[KeyPath] = ()
    ) -> Problem:
        """Return a problem at `path`, placed at the nearest key above it that was written.

        `parts` are the values that a sum was made of: the last override among them is named.
        """
        above = (path[:length] for length in range(len(path), -1, -1))
        place = next((self.places[key] for key in above if key in self.places), (self.name, None))
        typed = [place for key, place in self.places.items() if key in parts and not place[1]]
        source, line = typed[-1] if typed else place
        return Problem(source, line, ".".join(path) or None, text, valid)


def read_text(path: str, valid: str, if_missing: str = "") -> str:
    """Return the text of a file that should hold YAML.

    `valid` says how to name another file, `if_missing` what else may be typed if there is no file.
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
    """Return the data of YAML `text`. Problems name the source `name`; `empty` says what may be
    typed if there is nothing in it.
    """
    try:
        reader = _Reader(text, name)
        root = reader.get_single_node()
    except ReaderError as error:  # a control character
        line = text.count("\n", 0, error.position) + 1
        raise refusal(name, f"is not YAML: {error.reason}", None, line) from None
    except yaml.MarkedYAMLError as error:
        said = ", ".join(filter(None, (error.context, error.problem)))
        line = reader.line if error.problem_mark is None else error.problem_mark.line
        raise refusal(name, f"is not YAML: {said}", None, line + 1) from None
    except (ValueError, OverflowError):
        # PyYAML hands an escape such as "\UFFFFFFFF" and the digits of %YAML to Python as they are.
        reason = "is not YAML: an escape or a version number in it is too large"
        raise refusal(name, reason, "characters up to \\U0010FFFF", reader.line + 1) from None
    if root is None:
        raise refusal(name, "is empty", empty)
    return YamlSource(name=name, data=reader.plain(root), places=reader.places)


class _Reader(yaml.SafeLoader):
    """Composes nodes within `MAX_DEPTH` and `MAX_VALUES`, and makes plain data of them.

    Dates, `=`, `<<` and all keys are text. This is the pure-Python loader, whose recursion can be
    bounded here.
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
        """Return the plain value of `node`, and note its line or that of its key."""
        line = node.start_mark.line + 1 if line is None else line
        self.places[path] = (self._source, line)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.plain(item, (*path, str(n))) for n, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
            return self._scalar(node, path, line)
        found: dict[str, object] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            self._scalar(key, path, line)
            at = (*path, str(key.value))
            if at in self.places:
                text = f"is given twice, on line {self.places[at][1]} and on line {line}"
                raise refusal(self._source, text, "one of the two", line, at)
            found[at[-1]] = self.plain(value, at, line)
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


def listed(names: Collection[str]) -> str:
    """Return the first names, joined by commas, and how many more there are."""
    first, more = [*names][:_MOST_LISTED], len(names) - _MOST_LISTED
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def refusal(
    source: str, text: str, valid: str | None, line: int | None = None, path: KeyPath = ()
) -> ConfigError:
    """Return the error for one problem of a whole source, of a line of it, or of a key."""
    return ConfigError([Problem(source, line, ".".join(path) or None, text, valid)])


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path` with `overrides` (`a.b=value`) applied."""
    if_missing = f", or write one: python -m orchestrator init --output {path}"
    text = read_text(path, "--config PATH with the path of a cluster.yaml", if_missing)
    return validated(reduce(_with_override, overrides, read_yaml_text(text, path)))


def config_from_data(data: Mapping[str, object], name: str = "config") -> Config:
    """Return the configuration in plain `data`; problems are named after `name`."""
    return validated(YamlSource(name=name, data=dict(data)))


def config_from_text(text: str, name: str) -> Config:
    """Return the configuration in YAML `text`; problems are named after `name`."""
    return validated(read_yaml_text(text, name))


def dump_config(config: Config) -> str:
    """Return `config` as YAML with every key, which loads again as an equal configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def _with_override(source: YamlSource, typed: str) -> YamlSource:
    """Return `source` with one `a.b=value` put into its data.

    The value is read as YAML; nothing after the `=` is null, as in a file.
    """
    name = f"--set {typed}"
    dotted, equals, text = typed.partition("=")
    words = [word.strip() for word in dotted.split(".")]
    # One of the words may be a node's name, which holds up to 32 of them (`pc1.lan`).
    if not equals or not all(words) or len(words) > 2 * MAX_DEPTH:
        valid = "--set workload.size=4096, with the keys joined by dots"
        raise refusal(name, "is not KEY=VALUE", valid)
    nodes = source.data.get("nodes") if isinstance(source.data, dict) else None
    for end in range(len(words), 2, -1):
        node = ".".join(words[1:end])
        if words[0] == "nodes" and isinstance(nodes, dict) and node in nodes:
            words[1:end] = [node]
    path = tuple(words)
    try:
        value = read_yaml_text(text, name).data if text.strip() else None
    except ConfigError as error:
        # Lines and keys were counted inside the override, so they mean nothing to the user.
        raise refusal(name, error.problems[0].text, error.problems[0].valid, None, path) from None
    places = {key: old for key, old in source.places.items() if key[: len(path)] != path}
    data = here = deepcopy(source.data)
    for at, word in enumerate(path):
        if not isinstance(here, dict):
            branch = ".".join(path[:at]) or "the file"
            raise refusal(name, f"{branch} holds a single value or a list, no keys", None)
        if path[:at] == ("nodes",) and word not in here:
            valid = listed(here) or "no node is configured"
            raise refusal(name, f"there is no node {word}", valid)
        if at + 1 == len(path):
            here[word] = value
        elif here.get(word) is None:
            here[word] = {}
        here = here[word]
        places.setdefault(path[: at + 1], (name, None))
    return replace(source, data=data, places=places)


def validated(source: YamlSource) -> Config:
    """Return the data of `source` as a configuration; problems of single keys come first."""
    config = checked(source, Config)
    if problems := list(_between_keys(source, config)):
        raise refusals(source, problems)
    return config


def checked(source: YamlSource, model: type[Model]) -> Model:
    """Return the data of `source` as a `model`; `ConfigError` with everything wrong with it."""
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        # If a value may have several forms, pydantic reports an error for each.
        found: dict[KeyPath, list[ErrorDetails]] = {}
        for details in error.errors(include_url=False):
            found.setdefault(_path_of(source.data, details), []).append(details)
    # A misspelt key is one mistake: the missing key that was meant is not reported.
    for *above, word in [path for path, it in found.items() if it[0]["type"] == "extra_forbidden"]:
        meant = get_close_matches(word[:100].lower(), sorted(_fields(model, above)), n=1)
        if found.get((*above, *meant), found[*above, word])[0]["type"] == "missing":
            del found[*above, *meant]
    raise refusals(source, [_problem(source, model, *item) for item in found.items()])


def refusals(source: YamlSource, problems: Iterable[Problem]) -> ConfigError:
    """Return the error with `problems` in the order of the file, then of the overrides.

    After the first `MAX_PROBLEMS` it says how many more there are.
    """
    ordered = sorted(problems, key=lambda it: (it.source != source.name, it.line or 0))
    if len(ordered) > MAX_PROBLEMS:
        text = f"has {len(ordered) - MAX_PROBLEMS} more problems, not shown"
        ordered[MAX_PROBLEMS:] = [Problem(source.name, None, None, text, None)]
    return ConfigError(ordered)


def _path_of(data: object, details: ErrorDetails) -> KeyPath:
    """Return the keys in the data at which pydantic found an error, without the forms it tried."""
    path: list[str] = []
    for part in details["loc"]:
        inner = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(inner, dict) and part in inner:
            path.append(str(part))
            data = inner[part]
    is_missing = details["type"] == "missing"
    return (*path, str(details["loc"][-1])) if is_missing else tuple(path)


def _problem(
    source: YamlSource, model: type[BaseModel], path: KeyPath, errors: Sequence[ErrorDetails]
) -> Problem:
    """Return what is wrong at one place, in a sentence of one line."""
    details, kind, fields = errors[0], errors[0]["type"], _fields(model, path[:-1])
    if kind == "extra_forbidden":
        keys = sorted(fields)
        return source.problem(path, f"unknown key{nearest(path[-1], keys)}", ", ".join(keys))
    if details["loc"][-1:] == ("[key]",):
        return source.problem(path, "cannot be the name of a node", VALID_NODE_NAME)
    valid = fields[path[-1]].description if path and path[-1] in fields else None
    if kind == "value_error":
        if isinstance(gone := details["ctx"]["error"], RemovedKeyError):
            path = (*path, gone.key)
        # Our own validators say after "; valid: " what would be right.
        text, _, own = str(details["ctx"]["error"]).partition("; valid: ")
        return source.problem(path, text, own or valid)
    if kind in {"dict_type", "model_type"}:
        valid = valid or f"a mapping with the keys {', '.join(sorted(_fields(model, path)))}"
    said = [_WORDS.get(one["type"], one["msg"]) for one in errors]
    forms = dict.fromkeys(re.sub(r"^.*? should ", "", words) for words in said)
    text = f"{{value}} should {', or '.join(forms)}" if " should " in said[0] else said[0]
    text = text.replace("{value}", in_words(details["input"]))
    if kind == "literal_error":
        text += nearest(details["input"], re.findall(r"'([^']*)'", details["ctx"]["expected"]))
    return source.problem(path, text, valid)


def _fields(model: type[BaseModel], path: Sequence[str]) -> dict[str, FieldInfo]:
    """Return the fields of the section at `path`, by key; node names and numbers are skipped."""
    for key in path:
        field = model.model_fields.get(key)
        model = (field and _model_in(field.annotation)) or model
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _between_keys(source: YamlSource, config: Config) -> Iterator[Problem]:
    """Yield problems between several keys, each of which is right by itself."""
    nodes, head = config.nodes, config.cluster.head
    if head is not None and head not in nodes:
        text = f"there is no node {in_words(head)}{nearest(head, list(nodes))}"
        yield source.problem(("cluster", "head"), text, f"{listed(nodes)}, or null for the first")
    for name, node in nodes.items():
        yield from _node_problems(source, ("nodes", name), node)
    yield from _team_problems(source, config)


def _team_problems(source: YamlSource, config: Config) -> Iterator[Problem]:
    path: KeyPath = ("train", "team")
    if config.train.team is not None and config.workload.name != "train":
        text = f"a team trains, and workload.name is {config.workload.name}"
        valid = "workload.name: train (run --workload train), or team: null"
        yield source.problem(path, text, valid, [path, ("workload", "name")])
        return
    seen: dict[str, str] = {}
    every, is_right = list(team.slots(config)), True
    for number, name in enumerate(team.named(config)):
        slots, at = team.slots_of(name, config), (*path, str(number))
        twice = [slot for slot in slots if slot in seen]
        is_right &= bool(slots) and not twice
        if not slots:
            what, known = ("slot", every) if "/" in name else ("PC", list(config.nodes))
            text = f"there is no {what} {in_words(name)}{nearest(name, known)}"
            valid = f"{listed(config.nodes)}, a slot such as {every[-1]}, or all"
            yield source.problem(at, text, valid)
        elif twice:
            text = f"{name} has {twice[0]}, which {seen[twice[0]]} has named already"
            yield source.problem(at, text, "each member once")
        seen |= dict.fromkeys(slots, name)
    if config.train.split == "layers" and is_right and len(seen) > 2:
        text = f"split: layers divides a model over two members, and this team has {len(seen)}"
        yield source.problem(path, text, "two PCs or slots, or split: data")
    elif config.train.team is not None and is_right and len(seen) < 2:
        text = f"a team needs two members or more, and this one has {', '.join(seen) or 'none'}"
        yield source.problem(path, text, "two PCs or slots, or null")


def _node_problems(source: YamlSource, path: KeyPath, node: NodeConfig) -> Iterator[Problem]:
    gpus, workers = (*path, "gpus"), (*path, "workers")
    if node.gpu == "cpu" and node.gpus:
        text = f"{node.gpus} on a node whose gpu is cpu"
        yield source.problem(gpus, text, "gpus: 0, or the name of a card")
    elif node.gpus and node.gpu not in PROFILES and node.vram_gib is None:
        text = f"unknown card {node.gpu}{nearest(node.gpu, list(PROFILES))}"
        valid = f"{', '.join(PROFILES)}; any name if vram_gib is given; cpu with gpus: 0"
        yield source.problem((*path, "gpu"), text, valid, [gpus])
    if node.gpus > node.workers:
        text = f"{node.gpus} cards but only {node.workers} workers, so a card would have none"
        valid = f"gpus at most {node.workers}, or workers at least {node.gpus}"
        yield source.problem(gpus, text, valid, [workers, gpus])
    elif node.gpus and node.workers_per_card > MAX_WORKERS_PER_CARD:
        most = MAX_WORKERS_PER_CARD
        text = f"{node.workers} workers are more than {most} on a card, too many for Ray's shares"
        yield source.problem(workers, text, f"at most {most * node.gpus}", [workers, gpus])
    if (excess := node.overbooked) is not None:
        keys = ("gpu", "gpus", "workers", "vram_per_worker_gib", "memory_fraction", "vram_gib")
        yield source.problem(path, *excess, [(*path, key) for key in keys])


def nearest(typed: object, known: Sequence[str]) -> str:
    """Return `; did you mean …?` with the known word nearest to what was typed, or nothing."""
    # Only text is used as it is: Python refuses even `str` of a large enough int.
    word = typed if isinstance(typed, str) else in_words(typed)
    near = get_close_matches(word[:100].lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
