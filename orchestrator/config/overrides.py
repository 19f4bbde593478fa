"""Puts `--set a.b=value` into the data of cluster.yaml before it is validated.

Covers reading the override and finding its place. Does not cover whether the value is right: an override is
validated with the rest, and its problems name it as it was typed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config.yaml_source import KeyPath, YamlSource, cut, listed, read_yaml_text
from orchestrator.errors import ConfigError, Problem

#: The deepest key has four parts, one of which may be a node name of up to 32 words with dots between.
_MAX_WORDS = 64


def apply_overrides(source: YamlSource, overrides: Sequence[str]) -> YamlSource:
    """Return `source` with each `a.b=value` put into its data; values are read as YAML.

    An override that cannot be applied becomes one of the problems and changes nothing.
    """
    for typed in overrides:
        try:
            source = _with_override(source, typed)
        except ConfigError as error:
            source = replace(source, problems=(*source.problems, *error.problems))
    return source


def _with_override(source: YamlSource, typed: str) -> YamlSource:
    name = f"--set {typed}"
    dotted, equals, text = typed.partition("=")
    words = [word.strip() for word in dotted.split(".")]
    if not equals or not all(words) or len(words) > _MAX_WORDS:
        raise _refusal(name, "is not KEY=VALUE", "--set workload.size=4096, with the keys joined by dots")
    path = _path_of(words, source.data)
    value = _override_value(text, name, path)
    data = _put(source.data, path, value, name)
    lines = {where: line for where, line in source.lines.items() if where[: len(path)] != path}
    kept = {where: word for where, word in source.overrides.items() if where[: len(path)] != path}
    return replace(source, data=data, lines=lines, overrides={**kept, path: name})


def _override_value(text: str, name: str, path: KeyPath) -> object:
    """Return what the right-hand side means; nothing after the `=` is null, as in a file."""
    if not text.strip():
        return None
    try:
        value = read_yaml_text(text, name)
        problems = value.problems
    except ConfigError as error:
        problems = error.problems
    if problems:
        # Lines and keys were counted inside the override, so they mean nothing to the user.
        key = ".".join(path)
        raise ConfigError(replace(problem, line=None, key=key) for problem in problems)
    return value.data


def _path_of(words: Sequence[str], data: object) -> KeyPath:
    """Return the key path of dotted `words`; a key that itself holds dots (`pc1.lan`) is found if it exists."""
    path: list[str] = []
    rest = list(words)
    while rest:
        length = 1
        if isinstance(data, dict):
            length = next((n for n in range(len(rest), 1, -1) if ".".join(rest[:n]) in data), 1)
        key = ".".join(rest[:length])
        data = data.get(key) if isinstance(data, dict) else None
        path.append(key)
        rest = rest[length:]
    return tuple(path)


def _put(data: object, path: KeyPath, value: object, name: str, done: KeyPath = ()) -> object:
    """Return `data` with `value` at `path`; what lies beside the path is shared, not copied."""
    if not path:
        return value
    here = ".".join(done)
    if data is not None and not isinstance(data, dict):
        raise _refusal(name, f"{cut(here) or 'the file'} holds a single value or a list, no keys", None)
    branch: dict[str, object] = data or {}
    if done == ("nodes",) and path[0] not in branch:
        raise _refusal(name, f"there is no node {cut(path[0])}", listed(branch) or "no node is configured")
    return {**branch, path[0]: _put(branch.get(path[0]), path[1:], value, name, (*done, path[0]))}


def _refusal(name: str, text: str, valid: str | None) -> ConfigError:
    return ConfigError([Problem(name, None, None, text, valid)])
