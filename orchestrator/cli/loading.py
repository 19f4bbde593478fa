"""Options that several verbs share, and what they say: which configuration, which run folder, how a
new run is shown.

Each group of options is a dataclass; `shared` adds its fields to a verb. An option that only one
verb has is in the signature of that verb.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import typer
import yaml
from typer import Argument, Option

from orchestrator.config.duration import parse_duration
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.record.folders import LATEST, find_queue, find_run

if TYPE_CHECKING:
    from orchestrator.run.environment import Environment

DEFAULT_CONFIG: Final = "cluster.yaml"
"""The configuration that is read if the user names none."""

_NOTHING: Final[Mapping[str, str | None]] = MappingProxyType({})


def value(metavar: str, what: str, default: Any = None, *names: str) -> Any:  # noqa: ANN401
    """Return an option with a value, by default of its parameter's name; its value is typer's."""
    return Option(default, *names, help=what, metavar=metavar)


def flag(name: str, what: str) -> Any:  # noqa: ANN401 - as typer's
    """Return an option that is there or not, without a `--no-` beside it."""
    return Option(False, name, help=what)


AS_JSON: Any = flag("--json", "One JSON object on standard output, and nothing else there.")
RUN_ID: Any = Argument(
    LATEST, help="As `runs` shows it, or its end. Default: the newest.", metavar="RUN_ID"
)
SLOT: Any = Argument(help="Such as pc1/3.", metavar="SLOT")
APPLY_POWER_LIMIT: Any = flag(
    "--apply-power-limit", "Set power_limit_w on the cards until the run ends; as root."
)


def shared(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with an option for each field of the dataclasses among its parameters."""
    own = inspect.signature(verb, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        one.name: one.annotation for one in own if is_dataclass(one.annotation)
    }
    options = [(one.name, one.annotation, one.default) for one in own if one.name not in groups]
    for group in groups.values():
        hints = get_type_hints(group)
        options += [(field.name, hints[field.name], field.default) for field in fields(group)]

    @wraps(verb)
    def typed(**given: Any) -> None:  # noqa: ANN401 - what typer has read
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, hint, default in options
    ]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    return typed


@dataclass(frozen=True, kw_only=True)
class Configured:
    """Which configuration a verb reads."""

    config: str = value("FILE", "The configuration.", DEFAULT_CONFIG, "--config", "-c")
    overrides: list[str] | None = value(
        "KEY=VALUE", "Override any key: workload.size=4096. May be repeated.", None, "--set"
    )

    @property
    def is_missing(self) -> bool:
        """Whether the user names no configuration, and there is none here."""
        return self.config == DEFAULT_CONFIG and not Path(self.config).exists()

    def load(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """Return the configuration with what other options say of some keys, after `--set`."""
        return self._load(self.config, typed)

    def load_or_shipped(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """The same; where there is none, of that which comes with the program."""
        shipped = resources.files("orchestrator").joinpath(DEFAULT_CONFIG)
        return self._load(str(shipped) if self.is_missing else self.config, typed)

    def _load(self, path: str, typed: Mapping[str, str | None]) -> Config:
        quoted = partial(yaml.safe_dump, default_style='"', width=math.inf)
        given = [f"{key}={quoted(value)}" for key, value in typed.items() if value is not None]
        return load_config(path, [*(self.overrides or []), *map(str.strip, given)])


@dataclass(frozen=True, kw_only=True)
class Where(Configured):
    """Where the runs are."""

    run_dir: str | None = value("DIR", "Where run folders are. Default: run.dir.")

    def _load(self, path: str, typed: Mapping[str, str | None]) -> Config:
        return super()._load(path, {**typed, "run.dir": self.run_dir})

    @property
    def runs(self) -> Path:
        """The folder of the run folders."""
        return Path(self.load_or_shipped().run.dir)

    def run(self, run_id: str) -> Path:
        """Return the folder of a run, by its name, its end, or what `find_run` knows besides."""
        return find_run(self.runs, run_id)


@dataclass(frozen=True, kw_only=True)
class OfQueue(Where):
    """Which queue of jobs."""

    of_run: str = value("RUN_ID", "Default: the newest that has a queue.", LATEST, "--run")

    @property
    def folder(self) -> Path:
        """The folder of the run with the queue."""
        return find_queue(self.runs, self.of_run)


@dataclass(frozen=True, kw_only=True)
class Here(Configured):
    """On which machines it is done, and how it is told."""

    local: bool = flag("--local", "This machine alone, with what it really has.")
    rehearse: bool = flag("--rehearse", "Every node as a small copy here: real Ray and failures.")
    as_json: bool = AS_JSON

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.local and self.rehearse:
            raise UsageError("--local and --rehearse exclude each other")


@dataclass(frozen=True, kw_only=True)
class NewRun(Where, Here):
    """Where a new run goes on, and how it is shown."""

    plain: bool = flag("--plain", "Lines instead of a live table.")

    @property
    def mode(self) -> str:
        """As a run folder calls it."""
        return "rehearse" if self.rehearse else "local" if self.local else "cluster"

    def load_here(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """Return the configuration; for this machine alone the shipped one, where there is none."""
        if self.mode == "cluster" or not self.is_missing:
            return self.load(typed)
        what = "its defaults are used"
        if self.rehearse:
            what = "both PCs of the reference pair are rehearsed"
        typer.echo(f"no {DEFAULT_CONFIG} here: {what}; `init` writes one for your cards", err=True)
        return self.load_or_shipped(typed)

    def environment(self, config: Config) -> Environment:
        """Return where the run is to be."""
        from orchestrator.run import environment as environments  # noqa: PLC0415 - imports ray

        if self.rehearse:
            return environments.in_rehearsal(config)
        return (environments.on_this_machine if self.local else environments.on_cluster)(config)


def duration_s(text: str | None, option: str = "--duration") -> float | None:
    """Return what an option says of a length of time; `UsageError` if that is nothing."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


def import_from_here() -> None:
    """Make the user's own workload importable by workers: they get this process's search path."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
