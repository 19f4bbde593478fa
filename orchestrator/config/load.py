"""Reads cluster.yaml with its overrides (`--set a.b=value`) into a `Config`, says of every refusal
where: the file, its line and the key, and writes a `Config` as text again.

What is wrong with plain data is said by pydantic, except where its words name no key or no form
that may be typed. `checked` serves every other file that is read into a model. Does not cover the
models (`schema`) nor the lines of YAML (`yaml_source`). Every function that reads raises
`ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import reduce
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.config import team
from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import MAX_WORKERS_PER_CARD, VALID_NODE_NAME, Config, NodeConfig
from orchestrator.config.yaml_source import (
    KeyPath,
    YamlSource,
    listed,
    read_text,
    read_yaml_text,
    refusal,
)
from orchestrator.errors import ConfigError, Problem, in_words
from workers.training.settings import GoneKeyError

#: The deepest key has four parts, one of which may be a node name of up to 32 words with dots
#: between.
_MAX_WORDS = 64

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


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path` with `overrides` (`a.b=value`) applied."""
    if_missing = f", or write one: python -m orchestrator init --output {path}"
    text = read_text(path, "--config PATH with the path of a cluster.yaml", if_missing)
    return validated(reduce(_with_override, overrides, read_yaml_text(text, path)))


def config_from_data(data: Mapping[str, object], name: str = "config") -> Config:
    """Return the configuration in plain `data`; problems are named after `name`."""
    return validated(YamlSource(name=name, data=dict(data)))


def config_from_text(text: str, name: str) -> Config:
    """Return the configuration in YAML `text`, as `dump_config` writes it.

    Problems are named after `name`.
    """
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
    if not equals or not all(words) or len(words) > _MAX_WORDS:
        valid = "--set workload.size=4096, with the keys joined by dots"
        raise refusal(name, "is not KEY=VALUE", valid)
    path = _typed_path(words, source.data)
    try:
        value = read_yaml_text(text, name).data if text.strip() else None
    except ConfigError as error:
        # Lines and keys were counted inside the override, so they mean nothing to the user.
        raise ConfigError(
            replace(problem, line=None, key=".".join(path)) for problem in error.problems
        ) from None
    data = _put(source.data, path, value, name)
    places = {key: old for key, old in source.places.items() if key[: len(path)] != path}
    for length in range(1, len(path)):
        places.setdefault(path[:length], (name, None))
    return replace(source, data=data, places={**places, path: (name, None)})


def _typed_path(words: Sequence[str], data: object) -> KeyPath:
    """Return the key path of dotted `words`; a node's name may hold dots itself (`pc1.lan`)."""
    nodes = data.get("nodes") if isinstance(data, dict) and words[0] == "nodes" else None
    if isinstance(nodes, dict):
        for end in range(len(words), 2, -1):
            if (name := ".".join(words[1:end])) in nodes:
                return ("nodes", name, *words[end:])
    return tuple(words)


def _put(data: object, path: KeyPath, value: object, name: str, done: KeyPath = ()) -> object:
    """Return `data` with `value` at `path`; what lies beside the path is shared, not copied."""
    if not path:
        return value
    if data is not None and not isinstance(data, dict):
        here = ".".join(done) or "the file"
        raise refusal(name, f"{here} holds a single value or a list, no keys", None)
    branch: dict[str, object] = data or {}
    if done == ("nodes",) and path[0] not in branch:
        valid = listed(branch) or "no node is configured"
        raise refusal(name, f"there is no node {path[0]}", valid)
    return {**branch, path[0]: _put(branch.get(path[0]), path[1:], value, name, (*done, path[0]))}


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
    if kind == "extra_forbidden":
        keys = sorted(fields)
        return source.problem(path, f"unknown key{nearest(path[-1], keys)}", ", ".join(keys))
    if details["loc"][-1:] == ("[key]",):
        return source.problem(path, "cannot be the name of a node", VALID_NODE_NAME)
    valid = fields[path[-1]].description if path and path[-1] in fields else None
    if kind == "value_error":
        if isinstance(gone := details["ctx"]["error"], GoneKeyError):
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
    problems: list[Problem] = []
    for number, name in enumerate(team.named(config)):
        at, every = (*path, str(number)), list(team.slots(config))
        slots = team.slots_of(name, config)
        if not slots:
            what, known = ("slot", every) if "/" in name else ("PC", list(config.nodes))
            text = f"there is no {what} {in_words(name)}{nearest(name, known)}"
            valid = f"{listed(config.nodes)}, a slot such as {every[-1]}, or all"
            problems.append(source.problem(at, text, valid))
        elif twice := [slot for slot in slots if slot in seen]:
            text = f"{name} has {twice[0]}, which {seen[twice[0]]} has named already"
            problems.append(source.problem(at, text, "each member once"))
        seen |= dict.fromkeys(slots, name)
    if config.train.split == "layers" and not problems and len(seen) > 2:
        text = f"split: layers divides a model over two members, and this team has {len(seen)}"
        problems.append(source.problem(path, text, "two PCs or slots, or split: data"))
    if config.train.team is not None and not problems and len(seen) < 2:
        text = f"a team needs two members or more, and this one has {', '.join(seen) or 'none'}"
        problems.append(source.problem(path, text, "two PCs or slots, or null"))
    yield from problems


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
        yield source.problem(path, excess.text, excess.valid, [(*path, key) for key in keys])


def nearest(typed: object, known: Sequence[str]) -> str:
    """Return `; did you mean …?` with the known word nearest to what was typed, or nothing."""
    # Only text is taken as it is: of a large enough int even `str` is refused.
    word = typed if isinstance(typed, str) else in_words(typed)
    near = get_close_matches(word[:100].lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
