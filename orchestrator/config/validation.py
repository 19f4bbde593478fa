"""Validates plain data and words every refusal: what, where, and what may be typed instead.

Covers the translation of pydantic's findings into our sentences, and the checks between keys. Does not cover the models
themselves (`schema`). The `valid:` part is read from their constraints, so it cannot become outdated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from orchestrator.config.capacity import MAX_WORKERS, MAX_WORKERS_PER_CARD, overbooked, workers_per_card
from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.yaml_source import KeyPath, YamlSource, listed
from orchestrator.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestrator.config.schema import NodeConfig

_Model = TypeVar("_Model", bound=BaseModel)

#: What pydantic found, by its name for it, in our words after "is not".
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
    "literal_error": "one of the choices",
    "string_pattern_mismatch": "in the right form",
    "string_too_short": "in the right form",
    "string_too_long": "in the right form",
}
_TOO = {
    "greater_than": "small",
    "greater_than_equal": "small",
    "less_than": "large",
    "less_than_equal": "large",
}
#: Findings about a value that is missing, so it cannot be shown.
_WHOLE = {"missing": "is missing", "too_short": "holds nothing", "too_long": "holds too many entries"}
#: More sentences mean that it is the wrong file, and would push the first ones off the screen.
MAX_PROBLEMS = 100
_SHARE = "a share above 0, at most 1 (0.6 is 60 %)"


def validated(source: YamlSource, model: type[_Model], node_model: type[NodeConfig]) -> _Model:
    """Return the data of `source` as `model`; each entry under `nodes` is checked on its own as `node_model`.

    Raises:
        ConfigError: with every problem at once, in the order of the file, then of the overrides; the first
            `MAX_PROBLEMS` of them and how many more there are.
    """
    config: _Model | None = None
    problems = list(source.problems)
    # A value that could not be read has a problem already; its substitute must not add a second one.
    unreadable = {(problem.source, problem.line, problem.key) for problem in problems}
    try:
        config = model.model_validate(source.data)
    except ValidationError as error:
        found = [_translated(source, model, details) for details in error.errors(include_url=False)]
        problems += [problem for problem in found if (problem.source, problem.line, problem.key) not in unreadable]
    problems += _between_keys(source, node_model)
    if problems or config is None:
        problems.sort(key=lambda problem: (problem.source != source.name, problem.line or 0))
        if len(problems) > MAX_PROBLEMS:
            text = f"has {len(problems) - MAX_PROBLEMS} more problems, not shown"
            problems[MAX_PROBLEMS:] = [Problem(source.name, None, None, text, None)]
        raise ConfigError(problems)
    return config


def _translated(source: YamlSource, model: type[BaseModel], details: ErrorDetails) -> Problem:
    """Return one finding of pydantic in our words."""
    kind = details["type"]
    path = tuple(str(part) for part in details["loc"])
    if path[-1:] == ("[key]",):
        facts = _facts(get_args(model.model_fields["nodes"].annotation)[0])
        return source.problem(path[:-1], "cannot be the name of a node", facts.valid())
    if kind == "extra_forbidden":
        section, _ = _find(model, path[:-1])
        keys = sorted(section.model_fields) if section else []
        return source.problem(path, f"unknown key{_nearest(path[-1], keys)}", ", ".join(keys))
    section, field = _find(model, path)
    facts = _Facts() if field is None else _facts(field)
    valid = f"a mapping with the keys {', '.join(sorted(section.model_fields))}" if section else facts.valid()
    if kind == "value_error":
        # Our own validators say after "; valid: " what would be right.
        text, _, own = str(details["ctx"]["error"]).partition("; valid: ")
        return source.problem(path, text, own or valid)
    text = _text(kind, details["input"])
    if kind == "literal_error":
        text += _nearest(details["input"], facts.choices)
    return source.problem(path, text, valid)


def _text(kind: str, value: object) -> str:
    """Return what is wrong with `value`, given pydantic's word for it."""
    if kind in _WHOLE:
        return _WHOLE[kind]
    if kind in _TOO:
        return f"{_shown(value)} is too {_TOO[kind]}"
    wanted = _WANTED.get(kind, "usable here")
    # `"7"` and `7` look alike in a file, so a refusal of the type says that it was text.
    not_text = "text, not" if isinstance(value, str) and kind.endswith("_type") else "not"
    return f"{_shown(value)} is {not_text} {wanted}"


def _between_keys(source: YamlSource, node_model: type[NodeConfig]) -> Iterator[Problem]:
    """Yield problems between several keys; nodes that are invalid by themselves are left out."""
    data = source.data
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, dict):
        return
    cluster = data.get("cluster")
    head = cluster.get("head") if isinstance(cluster, dict) else None
    if isinstance(head, str) and head not in nodes:
        text = f"there is no node {_shown(head)}{_nearest(head, list(nodes))}"
        yield source.problem(("cluster", "head"), text, f"{listed(nodes)}, or null for the first")
    workers = 0
    for name, raw in nodes.items():
        try:
            node = node_model.model_validate(raw)
        except ValidationError:
            continue
        workers += node.workers
        yield from _node_problems(source, ("nodes", name), node)
    if workers > MAX_WORKERS:
        parts = [("nodes", name, "workers") for name in nodes]
        text = f"{workers} workers on {len(nodes)} nodes are too many for one head"
        yield source.problem(("nodes",), text, f"at most {MAX_WORKERS} workers in all", parts)


def _node_problems(source: YamlSource, path: KeyPath, node: NodeConfig) -> Iterator[Problem]:
    gpus, workers = (*path, "gpus"), (*path, "workers")
    if node.gpu == "cpu" and node.gpus:
        yield source.problem(gpus, f"{node.gpus} on a node whose gpu is cpu", "gpus: 0, or the name of a card", [gpus])
    elif node.gpus and node.gpu not in PROFILES and node.vram_gib is None:
        text = f"unknown card {node.gpu}{_nearest(node.gpu, list(PROFILES))}"
        valid = f"{', '.join(PROFILES)}; any name if vram_gib is given; cpu with gpus: 0"
        yield source.problem((*path, "gpu"), text, valid, [gpus])
    if node.gpus > node.workers:
        text = f"{node.gpus} cards but only {node.workers} workers, so a card would have none"
        yield source.problem(
            gpus, text, f"gpus at most {node.workers}, or workers at least {node.gpus}", [workers, gpus]
        )
    elif node.gpus and workers_per_card(node.workers, node.gpus) > MAX_WORKERS_PER_CARD:
        text = f"{node.workers} workers are more than {MAX_WORKERS_PER_CARD} on a card, too many to keep apart in Ray"
        yield source.problem(workers, text, f"at most {MAX_WORKERS_PER_CARD * node.gpus}", [workers, gpus])
    excess = overbooked(node)
    if excess is not None:
        parts = ("gpu", "gpus", "workers", "vram_per_worker_gib", "memory_fraction", "vram_gib")
        yield source.problem(path, excess.text, excess.valid, [(*path, part) for part in parts])


@dataclass(slots=True)
class _Facts:
    """What a field's annotation says about the values it takes."""

    types: list[object] = dataclass_field(default_factory=list)
    choices: list[str] = dataclass_field(default_factory=list)
    bounds: list[str] = dataclass_field(default_factory=list)
    description: str | None = None
    default: object = None

    def valid(self) -> str:
        """Return what may be typed, in words."""
        words = self.description or ", ".join(self.choices)
        if not words:
            kind = {int: "a whole number", float: "a number", str: "text"}.get(self.types[0], "another value")  # type: ignore[call-overload]
            words = _SHARE if self.bounds == ["above 0", "at most 1"] else ", ".join([kind, *self.bounds])
        if NoneType in self.types:
            words += ", or null"
        return words if self.default is None else f"{words} (default {self.default})"


def _facts(annotated: object) -> _Facts:
    facts = _Facts()
    _gather(annotated, facts)
    return facts


def _gather(annotated: object, facts: _Facts) -> None:
    """Add to `facts` what a field, an `Annotated`, a union or a plain type says."""
    if isinstance(annotated, FieldInfo):
        facts.description = facts.description or annotated.description
        if annotated.default is not PydanticUndefined and not isinstance(annotated.default, BaseModel):
            facts.default = annotated.default
        _gather(annotated.annotation, facts)
        facts.bounds += [words for item in annotated.metadata if (words := _bound(item)) is not None]
    elif get_origin(annotated) is Annotated:
        base, *extra = get_args(annotated)
        _gather(base, facts)
        for item in extra:
            if isinstance(item, FieldInfo):
                facts.description = facts.description or item.description
                facts.bounds += [words for part in item.metadata if (words := _bound(part)) is not None]
    elif get_origin(annotated) is Literal:
        facts.choices += [str(choice) for choice in get_args(annotated)]
    elif get_origin(annotated) in {Union, UnionType}:
        for member in get_args(annotated):
            _gather(member, facts)
    else:
        facts.types.append(annotated)


def _bound(item: object) -> str | None:
    """Return the constraint in words; `None` for metadata that bounds no number."""
    if isinstance(item, Ge):
        return f"at least {item.ge}"
    if isinstance(item, Gt):
        return f"above {item.gt}"
    if isinstance(item, Le):
        return f"at most {item.le}"
    return f"below {item.lt}" if isinstance(item, Lt) else None


def _find(model: type[BaseModel], path: KeyPath) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """Return the section that `path` names, or else the field; neither where there is no such key."""
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    rest = list(path)
    while rest and section is not None:
        field = section.model_fields.get(rest.pop(0))
        inner = None if field is None else field.annotation
        if get_origin(inner) is dict and rest:
            rest.pop(0)  # the name of an entry, which is the user's own
            inner = get_args(inner)[1]
        section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return (section, field) if not rest else (None, None)


def _nearest(typed: object, known: Sequence[str]) -> str:
    """Return a suggestion to append, or nothing where none is near."""
    # Only text is taken as it is: of a large enough int even `str` is refused.
    word = typed if isinstance(typed, str) else _shown(typed)
    near = get_close_matches(word[:100].lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(value: object) -> str:
    """Return `value` as it looks in YAML, short enough for a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    # repr of a longer int is refused by Python itself.
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    whole = repr(value)
    return whole if len(whole) <= 60 else f"{whole[:57]}…"
