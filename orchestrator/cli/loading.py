"""Options that several verbs share, and what they say: which configuration, which run folder, how a
new run is shown; and how text that may come from a file is printed.

Each group of options is a dataclass; `shared` adds its fields to a verb. Options of single verbs
are in `options`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer
from typer import Option

from orchestrator.config.duration import parse_duration
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config, RunConfig
from orchestrator.errors import UsageError
from orchestrator.record.folders import LATEST, find_queue, find_run
from orchestrator.view.cells import width_of, wrapped

if TYPE_CHECKING:
    from orchestrator.run.environment import Environment
    from orchestrator.run.runner import Faults

DEFAULT_CONFIG: Final = "cluster.yaml"
"""The configuration that is read if the user names none."""

AsJson = Annotated[
    bool, Option("--json", help="One JSON object on standard output, and nothing else there.")
]


def shared(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with an option for each field of the dataclasses among its parameters."""
    own = inspect.signature(verb, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        each.name: each.annotation for each in own if is_dataclass(each.annotation)
    }
    options = [(each.name, each.annotation, each.default) for each in own]
    options = [option for option in options if option[0] not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        options += [(field.name, hints[field.name], field.default) for field in fields(group)]

    @functools.wraps(verb)
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

    config: Annotated[str, Option("--config", "-c", help="The configuration.", metavar="FILE")] = (
        DEFAULT_CONFIG
    )
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            help="Override any key, such as workload.size=4096. May be repeated.",
            metavar="KEY=VALUE",
        ),
    ] = None

    def load(self, typed: Mapping[str, str | None] = MappingProxyType({})) -> Config:
        """Return the configuration with what other options say of some keys, after `--set`."""
        given = [f"{key}={_quoted(value)}" for key, value in typed.items() if value is not None]
        return load_config(self.config, [*(self.overrides or []), *given])


@dataclass(frozen=True, kw_only=True)
class Where(Configured):
    """Where the runs are."""

    run_dir: Annotated[
        str | None, Option(help="Where run folders are. Default: run.dir.", metavar="DIR")
    ] = None

    def load(self, typed: Mapping[str, str | None] = MappingProxyType({})) -> Config:
        """The same, with `--run-dir`."""
        return super().load({**typed, "run.dir": self.run_dir})

    def to_read(self) -> Config:
        """Return the configuration for a verb that starts no worker: the shipped one where there is
        no cluster.yaml here.

        Such a verb needs to know where runs are. It is told by `--run-dir`, or they are in the
        usual folder.
        """
        usual = Path(RunConfig.model_fields["dir"].default)
        if _is_missing(self.config) and (self.run_dir is not None or usual.is_dir()):
            return replace(self, config=_shipped()).load()
        return self.load()

    @property
    def runs(self) -> Path:
        """The folder of the run folders."""
        return Path(self.to_read().run.dir)

    def run(self, run_id: str) -> Path:
        """Return the folder of a run, by its name, its end, or what `find_run` knows besides."""
        return find_run(self.runs, run_id)


@dataclass(frozen=True, kw_only=True)
class OfQueue(Where):
    """Which queue of jobs."""

    of_run: Annotated[
        str,
        Option(
            "--run",
            help="As `runs` shows it, or its end. Default: the newest with a queue.",
            metavar="RUN_ID",
        ),
    ] = LATEST

    @property
    def folder(self) -> Path:
        """The folder of the run with the queue."""
        return find_queue(self.runs, self.of_run)


@dataclass(frozen=True, kw_only=True)
class Here(Configured):
    """On which machines it is done, and how it is told."""

    local: Annotated[
        bool, Option("--local", help="This machine alone, with what it really has.")
    ] = False
    rehearse: Annotated[
        bool,
        Option(
            "--rehearse",
            help="Every node as a small copy on this machine: real Ray, real failures.",
        ),
    ] = False
    as_json: AsJson = False

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.local and self.rehearse:
            raise UsageError("--local and --rehearse exclude each other")


@dataclass(frozen=True, kw_only=True)
class NewRun(Where, Here):
    """Where a new run goes on, and how it is shown."""

    plain: Annotated[bool, Option("--plain", help="Lines instead of a live table.")] = False

    @property
    def mode(self) -> str:
        """As a run folder calls it."""
        return "rehearse" if self.rehearse else "local" if self.local else "cluster"

    def load_here(self, typed: Mapping[str, str | None] = MappingProxyType({})) -> Config:
        """Return the configuration; for this machine alone the shipped one, where there is none."""
        if self.mode == "cluster" or not _is_missing(self.config):
            return self.load(typed)
        what = "its defaults are used"
        if self.rehearse:
            what = "both PCs of the reference pair are rehearsed"
        typer.echo(f"no {DEFAULT_CONFIG} here: {what}; `init` writes one for your cards", err=True)
        return replace(self, config=_shipped()).load(typed)

    def environment(self, config: Config, scale: float | None = None) -> Environment:
        """Return where the run is to be."""
        from orchestrator.run import environment as environments  # noqa: PLC0415 - imports ray

        if self.rehearse:
            return environments.in_rehearsal(config, scale)
        return (environments.on_this_machine if self.local else environments.on_cluster)(config)


@dataclass(frozen=True, kw_only=True)
class Injected:
    """What is injected into a run."""

    chaos: Annotated[
        str | None,
        Option(help='Inject faults, such as "oom:rate=0.05;kill:every=20s".', metavar="FAULTS"),
    ] = None
    chaos_seed: Annotated[int, Option(help="Of --chaos: the same seed, the same faults.")] = 0
    yes_really: Annotated[
        bool,
        Option(
            "--yes-really",
            help="Allow --chaos on a real cluster; with --apply-power-limit, memory offsets.",
        ),
    ] = False

    def faults(self) -> Faults | None:
        """Return what `--chaos` asks for; `UsageError` where that is nothing."""
        if self.chaos is None:
            return None
        from orchestrator.lab.chaos import Chaos  # noqa: PLC0415 - for some runs only

        return Chaos(self.chaos, self.chaos_seed, yes_really=self.yes_really)


def duration_s(text: str | None, option: str = "--duration") -> float | None:
    """Return what an option says of a length of time; `UsageError` if that is nothing."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


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
