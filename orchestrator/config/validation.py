"""Validates plain data and says of every refusal where: the file, its line and the key.

Serves cluster.yaml, and by `checked` every other file that is read into a model. What is wrong is
said by pydantic, except where its words name no key or no form that may be typed. Does not cover
the models (`schema`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.config.capacity import MAX_WORKERS_PER_CARD, overbooked, workers_per_card
from orchestrator.config.duration import shown
from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import VALID_NODE_NAME, Config, NodeConfig
from orchestrator.config.yaml_source import KeyPath, YamlSource, listed
from orchestrator.errors import ConfigError, Problem

#: Keys that cluster.yaml had once, with what to do instead.
RETIRED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "train.cudnn_benchmark": "nothing in its place: tried where train.micro is a number",
        "train.min_seq": "train.documents, with text of your own",
        "train.persistent": "nothing in its place: the loader's processes always stay",
        "train.set_to_none": "nothing in its place: gradients are always set to none",
        "train.start_method": "nothing in its place: a fork server starts the loader's processes",
    }
)

#: What pydantic found whose own words do not help who types a file, by its name for it.
_WORDS = {
    "missing": "is missing",
    "dict_type": "{value} should be a mapping",
    "model_type": "{value} should be a mapping",
    "string_pattern_mismatch": "{value} is not in the right form",
}
#: More sentences mean that it is the wrong file, and would push the first ones off the screen.
MAX_PROBLEMS = 100

Model = TypeVar("Model", bound=BaseModel)


def validated(source: YamlSource) -> Config:
    """Return the data of `source` as a configuration.

    `ConfigError` with every problem of single keys, or else with those between keys.
    """
    config = checked(source, Config)
    if problems := list(_between_keys(source, config)):
        raise refusals(source, problems)
    return config


def checked(source: YamlSource, model: type[Model]) -> Model:
    """Return the data of `source` as a `model`; `ConfigError` with everything wrong with it."""
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        # Of a value that may have several forms, pydantic tells what is wrong with each.
        found: dict[KeyPath, list[ErrorDetails]] = {}
        for details in error.errors(include_url=False):
            found.setdefault(_path_of(source.data, details), []).append(details)
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
    """Return the keys of the data that pydantic means; without the forms that it has tried."""
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
    if kind == "extra_forbidden" and (instead := RETIRED.get(".".join(path))):
        return source.problem(path, "is no key any more", instead)
    if kind == "extra_forbidden":
        keys = sorted(fields)
        return source.problem(path, f"unknown key{nearest(path[-1], keys)}", ", ".join(keys))
    if details["loc"][-1:] == ("[key]",):
        return source.problem(path, "cannot be the name of a node", VALID_NODE_NAME)
    valid = _description(fields[path[-1]]) if path and path[-1] in fields else None
    if kind == "value_error":
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


def _fields(model: type[BaseModel], path: KeyPath) -> dict[str, FieldInfo]:
    """Return what may stand in the section at `path`, by key; names of nodes and numbers of entries
    in the path are passed over.
    """
    for key in path:
        field = model.model_fields.get(key)
        model = (field and _model_in(field.annotation)) or model
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _description(field: FieldInfo) -> str | None:
    """Return the words for what a key may be, also of one that may be null as well."""
    forms = (note for form in get_args(field.annotation) for note in get_args(form)[1:])
    notes = (field, *(note for note in forms if isinstance(note, FieldInfo)))
    return next((note.description for note in notes if note.description), None)


def _between_keys(source: YamlSource, config: Config) -> Iterator[Problem]:
    """Yield problems between several keys, each of which is right by itself."""
    nodes, head = config.nodes, config.cluster.head
    if head is not None and head not in nodes:
        text = f"there is no node {in_words(head)}{nearest(head, list(nodes))}"
        yield source.problem(("cluster", "head"), text, f"{listed(nodes)}, or null for the first")
    for name, node in nodes.items():
        yield from _node_problems(source, ("nodes", name), node)


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
    elif node.gpus and workers_per_card(node.workers, node.gpus) > MAX_WORKERS_PER_CARD:
        most = MAX_WORKERS_PER_CARD
        text = f"{node.workers} workers are more than {most} on a card, too many for Ray's shares"
        yield source.problem(workers, text, f"at most {most * node.gpus}", [workers, gpus])
    excess = overbooked(node)
    if excess is not None:
        keys = ("gpu", "gpus", "workers", "vram_per_worker_gib", "memory_fraction", "vram_gib")
        yield source.problem(path, excess.text, excess.valid, [(*path, key) for key in keys])


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
