"""What several verbs do with their arguments: load the configuration, and print what may come from a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

import typer

from orchestrator.config.duration import parse_duration
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.watch.cells import width_of, wrapped


def duration_s(text: str | None) -> float | None:
    """Return what `--duration` means; `UsageError` if that is nothing."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--duration {text}: {error}") from error


def config_of(config: str, overrides: list[str] | None, typed: Mapping[str, str | None]) -> Config:
    """Return the configuration with what options of their own say of some keys, after `--set`."""
    given = [f"{key}={json.dumps(value)}" for key, value in typed.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def print_text(text: str) -> None:
    """Print text that may come from a file: characters that the terminal cannot show must not stop the output.

    On a terminal long lines are broken between words, those of JSON are not.
    """
    encoding = sys.stdout.encoding or "utf-8"
    width = None if text.startswith("{") else width_of(sys.stdout)
    typer.echo(wrapped(text.encode(encoding, "backslashreplace").decode(encoding), width))


def import_from_here() -> None:
    """Make the user's own workload importable by workers: they get this process's search path."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
