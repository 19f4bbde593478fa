"""Reads cluster.yaml with its overrides into a `Config`, and writes a `Config` as text again.

Does not cover the models (`schema`), the reading of YAML with its lines (`yaml_source`), nor the words of a refusal
(`validation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from orchestrator.config.overrides import apply_overrides
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.config.validation import validated
from orchestrator.config.yaml_source import YamlSource, plain_source, read_yaml_file, read_yaml_text


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path` with `overrides` (`a.b=value`) applied.

    Raises:
        ConfigError: with every problem of the file and the overrides at once.
    """
    return _checked(apply_overrides(read_yaml_file(path), overrides))


def config_from_data(data: Mapping[str, object], name: str = "config") -> Config:
    """Return the configuration in plain `data`; problems are named after `name`.

    Raises:
        ConfigError: with every problem at once.
    """
    return _checked(plain_source(name, dict(data)))


def config_from_text(text: str, name: str) -> Config:
    """Return the configuration in YAML `text`, as `dump_config` writes it; problems are named after `name`.

    Raises:
        ConfigError: with every problem at once.
    """
    return _checked(read_yaml_text(text, name))


def dump_config(config: Config) -> str:
    """Return `config` as YAML with every key, which loads again as an equal configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def _checked(source: YamlSource) -> Config:
    return validated(source, Config, NodeConfig)
