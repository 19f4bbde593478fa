"""Validates plain data and words every refusal: what, where, and what may be typed instead.

Serves cluster.yaml, and by `checked` every other file that is read into a model. Does not cover the
models (`schema`). The `valid:` part is read from their JSON schema, so it cannot
become outdated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config.capacity import (
    MAX_WORKERS,
    MAX_WORKERS_PER_CARD,
    overbooked,
    workers_per_card,
)
from orchestrator.config.duration import shown
from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.config.yaml_source import KeyPath, YamlSource, listed
from orchestrator.errors import ConfigError, Problem
from workers.training.settings import RENAMED

#: What pydantic found, by its name for it. A finding about a value that is missing does not show
#: the value.
_SENTENCES = {
    "missing": "is missing",
    "too_short": "holds nothing",
    "too_long": "holds too many entries",
    "int_type": "{value} is {no} a whole number",
    "float_type": "{value} is {no} a number",
    "string_type": "{value} is {no} text",
    "dict_type": "{value} is {no} a mapping",
    "model_type": "{value} is {no} a mapping",
    "finite_number": "{value} is {no} a finite number",
    "literal_error": "{value} is {no} one of the choices",
    **dict.fromkeys(("greater_than", "greater_than_equal"), "{value} is too small"),
    **dict.fromkeys(("less_than", "less_than_equal"), "{value} is too large"),
    **dict.fromkeys(
        ("string_pattern_mismatch", "string_too_short", "string_too_long"),
        "{value} is {no} in the right form",
    ),
}
#: Words of the JSON schema in ours.
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_SHARE = "a share above 0, at most 1 (0.6 is 60 %)"
#: More sentences mean that it is the wrong file, and would push the first ones off the screen.
MAX_PROBLEMS = 100

Model = TypeVar("Model", bound=BaseModel)


def validated(source: YamlSource) -> Config:
    """Return the data of `source` as a configuration.

    Raises:
        ConfigError: with every problem at once, in the order of the file, then of the overrides;
            the first `MAX_PROBLEMS` of them and how many more there are.
    """
    config, problems = checked(source, Config)
    problems += _between_keys(source)
    if problems or config is None:
        raise refusals(source, problems)
    return config


def checked(source: YamlSource, model: type[Model]) -> tuple[Model | None, list[Problem]]:
    """Return the data of `source` as a `model` if it is one, and everything wrong with it."""
    value: Model | None = None
    problems = list(source.problems)
    # A value that could not be read has a problem already; its substitute must not add a second
    # one.
    unreadable = {(problem.source, problem.line, problem.key) for problem in problems}
    try:
        value = model.model_validate(source.data)
    except ValidationError as error:
        found = [_translated(source, model, details) for details in error.errors(include_url=False)]
        fresh = (
            problem
            for problem in found
            if (problem.source, problem.line, problem.key) not in unreadable
        )
        problems += dict.fromkeys(fresh)
    return value, problems


def refusals(source: YamlSource, problems: Sequence[Problem]) -> ConfigError:
    """Return the error with `problems` in the order of the file, then of the overrides."""
    ordered = sorted(problems, key=lambda it: (it.source != source.name, it.line or 0))
    if len(ordered) > MAX_PROBLEMS:
        text = f"has {len(ordered) - MAX_PROBLEMS} more problems, not shown"
        ordered[MAX_PROBLEMS:] = [Problem(source.name, None, None, text, None)]
    return ConfigError(ordered)


def _translated(source: YamlSource, model: type[BaseModel], details: ErrorDetails) -> Problem:
    kind, value = details["type"], details["input"]
    path = tuple(str(part) for part in details["loc"])
    if path[:1] == ("train",) and len(path) > 2:
        # Behind the key stands which of the forms of its value was tried; each has a refusal of its
        # own.
        path, kind = path[:2], "no_form"
    if path[-1:] == ("[key]",):
        valid = _merged(_schema_of(model, ("cluster", "head")))["description"]
        return source.problem(path[:-1], "cannot be the name of a node", valid)
    if kind == "extra_forbidden":
        if path[0] == "train" and (renamed := RENAMED.get(path[-1])):
            return source.problem(path, "has a new name", f"train.{renamed}")
        keys = sorted(_section(model, _schema_of(model, path[:-1]))["properties"])
        return source.problem(path, f"unknown key{nearest(path[-1], keys)}", ", ".join(keys))
    schema = _schema_of(model, path)
    if kind == "value_error":
        # Our own validators say after "; valid: " what would be right.
        text, _, own = str(details["ctx"]["error"]).partition("; valid: ")
        return source.problem(path, text, own or _valid(schema))
    # `"7"` and `7` look alike in a file, so a refusal of the type says that it was text.
    no = "text, not" if isinstance(value, str) and kind.endswith("_type") else "not"
    text = _SENTENCES.get(kind, "{value} is {no} usable here").format(value=in_words(value), no=no)
    if kind == "literal_error":
        text += nearest(value, [str(choice) for choice in _merged(schema)["enum"]])
    return source.problem(path, text, _valid(schema))


def _between_keys(source: YamlSource) -> Iterator[Problem]:
    """Yield problems between several keys; nodes that are invalid by themselves are left out."""
    data = source.data
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, dict):
        return
    cluster = data.get("cluster")
    head = cluster.get("head") if isinstance(cluster, dict) else None
    if isinstance(head, str) and head not in nodes:
        text = f"there is no node {in_words(head)}{nearest(head, list(nodes))}"
        yield source.problem(("cluster", "head"), text, f"{listed(nodes)}, or null for the first")
    workers = 0
    for name, raw in nodes.items():
        try:
            node = NodeConfig.model_validate(raw)
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
        yield source.problem(
            gpus,
            f"{node.gpus} on a node whose gpu is cpu",
            "gpus: 0, or the name of a card",
            [gpus],
        )
    elif node.gpus and node.gpu not in PROFILES and node.vram_gib is None:
        text = f"unknown card {node.gpu}{nearest(node.gpu, list(PROFILES))}"
        valid = f"{', '.join(PROFILES)}; any name if vram_gib is given; cpu with gpus: 0"
        yield source.problem((*path, "gpu"), text, valid, [gpus])
    if node.gpus > node.workers:
        text = f"{node.gpus} cards but only {node.workers} workers, so a card would have none"
        valid = f"gpus at most {node.workers}, or workers at least {node.gpus}"
        yield source.problem(gpus, text, valid, [workers, gpus])
    elif node.gpus and workers_per_card(node.workers, node.gpus) > MAX_WORKERS_PER_CARD:
        text = (
            f"{node.workers} workers are more than {MAX_WORKERS_PER_CARD} on a card, too many "
            "to keep apart in Ray"
        )
        yield source.problem(
            workers, text, f"at most {MAX_WORKERS_PER_CARD * node.gpus}", [workers, gpus]
        )
    excess = overbooked(node)
    if excess is not None:
        parts = ("gpu", "gpus", "workers", "vram_per_worker_gib", "memory_fraction", "vram_gib")
        yield source.problem(path, excess.text, excess.valid, [(*path, part) for part in parts])


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _schema_of(model: type[BaseModel], path: KeyPath) -> dict[str, Any]:
    found = _schema(model)
    for key in path:
        found = _section(model, found)
        entries = found.get("patternProperties")  # their names are the user's own
        inner = next(iter(entries.values())) if entries else found.get("items")
        found = inner or found["properties"][key]
    return found if "anyOf" in found else _section(model, found)


def _section(model: type[BaseModel], found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that is meant by a reference, or by a section that may be null."""
    form = next((form for form in found.get("anyOf", ()) if "$ref" in form), found)
    named = _schema(model).get("$defs", {}).get(form.get("$ref", "").rpartition("/")[2], found)
    return dict(named)


def _merged(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema together with that of its first alternative.

    The second is null, or text.
    """
    return {**schema.get("anyOf", [{}])[0], **schema}


def _valid(schema: dict[str, Any]) -> str:
    if "properties" in schema:
        return f"a mapping with the keys {', '.join(sorted(schema['properties']))}"
    field, several = (
        _merged(schema),
        [form for form in schema.get("anyOf", ()) if form.get("type") != "null"],
    )
    words: str = field.get("description") or field.get("const") or ", ".join(field.get("enum", ()))
    if len(several) > 1 and "description" not in schema:
        words = ", or ".join(map(_valid, several))
    if not words:
        bounds = [f"{said} {field[name]}" for name, said in _BOUNDS.items() if name in field]
        kind = _KINDS.get(field.get("type", ""), "another value")
        words = _SHARE if bounds == ["above 0", "at most 1"] else ", ".join([kind, *bounds])
    if {"type": "null"} in schema.get("anyOf", ()):
        words += ", or null"
    default = field.get("default")
    return words if default is None else f"{words} (default {default})"


def nearest(typed: object, known: Sequence[str]) -> str:
    """Return `; did you mean …?` with the known word nearest to what was typed, or nothing."""
    # Only text is taken as it is: of a large enough int even `str` is refused.
    word = typed if isinstance(typed, str) else in_words(typed)
    near = get_close_matches(word[:100].lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def in_words(value: object) -> str:
    """Return a value of a file for a refusal, as its author may have typed it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return shown(value)
