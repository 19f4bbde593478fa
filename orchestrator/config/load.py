"""Reads cluster.yaml with its overrides (`--set a.b=value`) into a `Config`, and writes a `Config`
as text again.

Does not cover the models (`schema`), the lines of YAML (`yaml_source`), nor words of a refusal
(`validation`), which names an override as it was typed. Every function that reads raises
`ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import yaml

from orchestrator.config.schema import Config
from orchestrator.config.validation import validated
from orchestrator.config.yaml_source import (
    KeyPath,
    YamlSource,
    listed,
    read_yaml_file,
    read_yaml_text,
    refusal,
)
from orchestrator.errors import ConfigError

#: The deepest key has four parts, one of which may be a node name of up to 32 words with dots
#: between.
_MAX_WORDS = 64


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path` with `overrides` (`a.b=value`) applied."""
    return validated(reduce(_with_override, overrides, read_yaml_file(path)))


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
    path = _path_of(words, source.data)
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


def _path_of(words: Sequence[str], data: object) -> KeyPath:
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
