"""The options that several verbs share: configuration, run folders, machines, display of a new run.

Each group of options is a dataclass; `shared` adds its fields to a verb. An option of a single verb
is in the signature of that verb.
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
    """Return an option with a value. Without `names`, typer names it after the parameter."""
    return Option(default, *names, help=what, metavar=metavar)


def flag(name: str, what: str) -> Any:  # noqa: ANN401 - as typer's
    """Return an option without a value, and without a `--no-` counterpart."""
    return Option(False, name, help=what)


AS_JSON: Any = flag("--json", "One JSON object on standard output, and nothing else there.")
RUN_ID: Any = Argument(
    LATEST, help="As `runs` shows it, or its ending. Default: the newest.", metavar="RUN_ID"
)
SLOT: Any = Argument(help="Such as pc1/3.", metavar="SLOT")
APPLY_POWER_LIMIT: Any = flag(
    "--apply-power-limit", "Set power_limit_w on the cards until the run ends; as root."
)


def shared(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb that has, in place of each dataclass parameter, an option for each field."""
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
class ConfigOptions:
    """Options that choose the configuration."""

    config: str = value("FILE", "The configuration.", DEFAULT_CONFIG, "--config", "-c")
    overrides: list[str] | None = value(
        "KEY=VALUE", "Override any key: workload.size=4096. May be repeated.", None, "--set"
    )

    @property
    def is_missing(self) -> bool:
        """Whether the user names no configuration, and the default file does not exist."""
        return self.config == DEFAULT_CONFIG and not Path(self.config).exists()

    def load(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """Return the configuration, with `--set`, then with the values in `typed`, keyed by key."""
        return self._load(self.config, typed)

    def load_or_shipped(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """As `load`, but read the configuration of the package if `is_missing`."""
        shipped = resources.files("orchestrator").joinpath(DEFAULT_CONFIG)
        return self._load(str(shipped) if self.is_missing else self.config, typed)

    def _load(self, path: str, typed: Mapping[str, str | None]) -> Config:
        quoted = partial(yaml.safe_dump, default_style='"', width=math.inf)
        given = [f"{key}={quoted(value)}" for key, value in typed.items() if value is not None]
        return load_config(path, [*(self.overrides or []), *map(str.strip, given)])


@dataclass(frozen=True, kw_only=True)
class RunsOptions(ConfigOptions):
    """Options that choose the folder of run folders."""

    run_dir: str | None = value("DIR", "The folder with the run folders. Default: run.dir.")

    def _load(self, path: str, typed: Mapping[str, str | None]) -> Config:
        return super()._load(path, {**typed, "run.dir": self.run_dir})

    @property
    def runs(self) -> Path:
        """The folder that contains the run folders."""
        return Path(self.load_or_shipped().run.dir)

    def run(self, run_id: str) -> Path:
        """Return the folder of a run; see `find_run` for the forms of `run_id`."""
        return find_run(self.runs, run_id)


@dataclass(frozen=True, kw_only=True)
class QueueOptions(RunsOptions):
    """Options that choose a queue of jobs."""

    of_run: str = value("RUN_ID", "Default: the newest that has a queue.", LATEST, "--run")

    @property
    def folder(self) -> Path:
        """The folder of the run with the queue."""
        return find_queue(self.runs, self.of_run)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(ConfigOptions):
    """Options that choose the machines, and the form of the output."""

    local: bool = flag("--local", "Use only this machine, with the cards that it has.")
    rehearse: bool = flag("--rehearse", "A small copy of every node here: real Ray and failures.")
    as_json: bool = AS_JSON

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.local and self.rehearse:
            raise UsageError("--local and --rehearse exclude each other")


@dataclass(frozen=True, kw_only=True)
class NewRunOptions(RunsOptions, MachineOptions):
    """Options of verbs that start a run."""

    plain: bool = flag("--plain", "Lines instead of a live table.")

    @property
    def mode(self) -> str:
        """The mode by its name in run folders."""
        return "rehearse" if self.rehearse else "local" if self.local else "cluster"

    def load_here(self, typed: Mapping[str, str | None] = _NOTHING) -> Config:
        """Return the configuration; with --local or --rehearse the shipped one if it is missing."""
        if self.mode == "cluster" or not self.is_missing:
            return self.load(typed)
        what = "its defaults are used"
        if self.rehearse:
            what = "both PCs of the reference pair are rehearsed"
        typer.echo(f"no {DEFAULT_CONFIG} here: {what}; `init` writes one for your cards", err=True)
        return self.load_or_shipped(typed)

    def environment(self, config: Config) -> Environment:
        """Return the environment in which the run will take place."""
        from orchestrator.run import environment as environments  # noqa: PLC0415 - imports ray

        if self.rehearse:
            return environments.in_rehearsal(config)
        return (environments.on_this_machine if self.local else environments.on_cluster)(config)


def duration_s(text: str | None, option: str = "--duration") -> float | None:
    """Return the duration that an option says, in seconds; `UsageError` if it is not one."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


def import_from_here() -> None:
    """Add the current folder to the search path, which workers inherit, for the user's workload."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
