"""What several verbs do with their arguments: load the configuration, and print what may come from
a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from orchestrator.config.duration import parse_duration
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config, RunConfig
from orchestrator.errors import UsageError
from orchestrator.view.cells import width_of, wrapped

if TYPE_CHECKING:
    from orchestrator.run.runner import Experiment

DEFAULT_CONFIG: Final = "cluster.yaml"
"""The configuration that is read if the user names none."""


def duration_s(text: str | None, option: str = "--duration") -> float | None:
    """Return the seconds that an option means; `UsageError` names it if that is nothing."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


def config_of(config: str, overrides: list[str] | None, typed: Mapping[str, str | None]) -> Config:
    """Return the configuration with what options of their own say of some keys, after `--set`."""
    given = [f"{key}={_quoted(value)}" for key, value in typed.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def config_to_read(config: str, overrides: list[str] | None, run_dir: str | None) -> Config:
    """Return the configuration for a verb that starts no worker: the shipped one where there is no
    cluster.yaml here.

    Such a verb needs to know where runs are. It is told by `--run-dir`, or they are in the usual
    folder.
    """
    usual = Path(RunConfig.model_fields["dir"].default)
    if _is_missing(config) and (run_dir is not None or usual.is_dir()):
        config = _shipped()
    return config_of(config, overrides, {"run.dir": run_dir})


def config_of_one_machine(
    config: str, overrides: list[str] | None, typed: Mapping[str, str | None], *, rehearse: bool
) -> Config:
    """Return the configuration for a run on this machine alone, and say if it is
    the shipped one.
    """
    if _is_missing(config):
        what = (
            "both PCs of the reference pair are rehearsed" if rehearse else "its defaults are used"
        )
        typer.echo(f"no {DEFAULT_CONFIG} here: {what}; `init` writes one for your cards", err=True)
        config = _shipped()
    return config_of(config, overrides, typed)


def _is_missing(config: str) -> bool:
    return config == DEFAULT_CONFIG and not Path(config).exists()


def _shipped() -> str:
    return str(resources.files("orchestrator").joinpath(DEFAULT_CONFIG))


def _quoted(value: str) -> str:
    """Return text as YAML.

    Its escapes have no pairs of surrogates, with which JSON writes what is beyond U+FFFF.
    """
    return (
        '"'
        + "".join(char if ord(char) > 0xFFFF else json.dumps(char)[1:-1] for char in value)
        + '"'
    )


def print_text(text: str) -> None:
    """Print text that may come from a file: characters that the terminal cannot show must not stop
    the output.

    On a terminal long lines are broken between words, those of JSON are not.
    """
    encoding = sys.stdout.encoding or "utf-8"
    is_json = text.startswith("{")
    shown = text.encode(encoding, "backslashreplace" if is_json else "replace").decode(encoding)
    typer.echo(wrapped(shown, None if is_json else width_of(sys.stdout)))


def import_from_here() -> None:
    """Make the user's own workload importable by workers: they get this process's search path."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109


def experiments_of(chaos: str | None, chaos_seed: int, *, yes_really: bool) -> Iterator[Experiment]:
    """Yield what the laboratory adds to a run."""
    if chaos is not None:
        from orchestrator.lab.chaos import Chaos  # noqa: PLC0415 - for some runs only

        yield Chaos(chaos, chaos_seed, yes_really=yes_really)
