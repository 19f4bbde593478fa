"""The schema of a job file, as frozen models.

Checks each section by itself. Does not check sections against each other or against cluster.yaml
(`spec`), and makes no jobs (`sweep`). Pure.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from orchestrator.config.duration import parse_duration
from orchestrator.config.schema import Gib, Section
from orchestrator.errors import in_words
from workers.settings import CommandSpec

#: A file with more jobs than this most likely has a mistake in a sweep. A turn of the head visits
#: each job of the queue, and takes about 10 ms for 1,000 of them.
MAX_JOBS: Final = 2_000

#: Numbers of YAML 1.2 that YAML 1.1 reads as text, such as `1e-4`.
_EXPONENT = re.compile(r"[+-]?\d{1,30}(?:\.\d{0,30})?[eE][+-]?\d{1,3}", re.ASCII)
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d) ?- ?([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)
#: Text that a shell would expand, outside of quotes or within double quotes. No shell runs here, so
#: a command of one line that has it is refused. In a list each word is passed on as it is.
_EXPANSION = re.compile(r"(?<!\\)(?:\$(?:[A-Za-z_]\w*|[{(])|`)", re.ASCII)
_SHELL_WORD = re.compile(
    rf"^(?:[|&;]+|<|~(?:/.*)?)$|^(?:\d+|&)?>|&&|\|\||[;&]$|\*|{_EXPANSION.pattern}"
)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Prefix of the environment variables that describe a job to its program.
_OURS: Final = "ORCHESTRATOR_"

VALID_NAME: Final = (
    "1 to 60 of A-Z, a-z, 0-9, . - _ that begin with a letter or digit; it is also a folder's name"
)
Name: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$", description=VALID_NAME)
]

_COMMAND: Final = "a list such as [python, train.py, --lr, 3e-4], or the same as one line of text"
_NAMES: Final = "a name, or a list of names"


def with_numbers(value: Any) -> Any:  # noqa: ANN401  # a file may hold anything
    """Return `value` with texts such as `1e-4` replaced by numbers, as YAML 1.2 reads them."""
    if isinstance(value, dict):
        return {key: with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(with_numbers, value))
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


# TRY004 is switched off below: pydantic expects a ValueError.


def as_argument(value: object) -> str:
    """Return a text or number as an argument for a program; `ValueError` for other values."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        said = f"{in_words(value)} is not text; valid: the same in quotes, or a number"
        raise ValueError(said)  # noqa: TRY004
    return str(value)


def _argv(value: object) -> tuple[str, ...]:
    words = value
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {error}; valid: {_COMMAND}") from None
        shown = _QUOTED.sub(_expanded, value).split()
        found = next((word for word in shown if _SHELL_WORD.search(word)), None)
        if found is not None:
            raise ValueError(
                f"has {found!r}, and no shell reads it; valid: [sh, -c, 'the line'], a command "
                "without it, or a list such as [python, train.py, '*.py'], whose words the program "
                "gets as they are"
            )
    if not isinstance(words, list):
        raise ValueError(f"{in_words(value)} is not a command; valid: {_COMMAND}")  # noqa: TRY004
    if not words or words[0] == "":
        raise ValueError(f"names no program; valid: {_COMMAND}")
    if str(words[0]).startswith("-"):  # such as a misspelt option of `jobs submit`
        raise ValueError(f"begins with {words[0]!r}, an option, not a program; valid: {_COMMAND}")
    if assigned := _ASSIGNMENT.fullmatch(str(words[0])):
        raise ValueError(
            f"begins with {words[0]!r}, and no shell reads it; valid: the command without it, and "
            f"env: {{{assigned[1]}: {assigned[2]!r}}}"
        )
    return tuple(as_argument(word) for word in words)


def _expanded(quoted: re.Match[str]) -> str:
    """Return the parts of a quoted text that a shell would expand, or `_` if there are none."""
    return "".join(_EXPANSION.findall(quoted[0]) if quoted[0][0] == '"' else ()) or "_"


def _env(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{in_words(value)} is not a mapping; valid: NAME: value")  # noqa: TRY004
    for name in value:
        if not _VARIABLE.fullmatch(name) or name.startswith(_OURS):
            raise ValueError(
                f"{in_words(name)} cannot be set; valid: letters, digits and _, not a digit first, "
                f"and not {_OURS}… which tells a job about itself"
            )
    return {name: as_argument(text) for name, text in value.items()}


def _names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(
        name and isinstance(name, str) for name in names
    ):
        raise ValueError(f"{in_words(value)} is neither text nor a list of it; valid: {_NAMES}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"has {in_words(twice)} twice; valid: each name once")
    return tuple(names)


def _patterns(value: object) -> tuple[str, ...]:
    for pattern in (patterns := _names(value)):
        if pattern.startswith("/") or ".." in pattern.split("/") or not pattern.strip("./"):
            text = f"{in_words(pattern)} is not within the program's folder; valid: such as *.json"
            raise ValueError(text)
    return patterns


def _nodes(value: object) -> tuple[str, ...]:
    return () if value == "any" else _names(value)


def _seconds(value: object) -> float | None:
    return None if value is None else parse_duration(value)


def _hours(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    found = _HOURS.fullmatch(value.strip()[:60]) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            f"{in_words(value)} is not a part of the day; valid: such as 22:00-07:00, or null"
        )
    first, last = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
    if first == last:
        raise ValueError(f"{in_words(value)} begins when it ends; valid: null for the whole day")
    return first, last


def _pack(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return value is True
    raise ValueError(
        f"{in_words(value)} is neither true nor false: two jobs share a card only where both say "
        "so; valid: true in each of them, or leave it out"
    )


def _single(value: object) -> object:
    if isinstance(value, dict | list):
        text = (
            f"{in_words(value)} is not a single value; valid: text, a number, true, false or null"
        )
        raise ValueError(text)  # noqa: TRY004
    return value


_Value: TypeAlias = Annotated[Any, AfterValidator(_single)]
_Values: TypeAlias = Annotated[list[_Value], Field(min_length=1)]
_Bounds: TypeAlias = Annotated[
    list[Annotated[float, BeforeValidator(with_numbers), Field(ge=-1e300, le=1e300)]],
    Field(min_length=2, max_length=2),
]
_Rows: TypeAlias = Annotated[
    list[Annotated[dict[str, _Value], Field(min_length=1)]], Field(min_length=1)
]
_Keys: TypeAlias = Annotated[
    dict[
        str,
        Annotated[
            Annotated[_Values, Tag("list")] | Annotated["Interval", Tag("interval")],
            Discriminator(lambda it: "interval" if isinstance(it, dict | BaseModel) else "list"),
        ],
    ],
    Field(min_length=1),
]


class Shared(Section):
    """The keys that an entry and `defaults` have in common."""

    retries: Annotated[int, Field(ge=0, le=1000)] = 1
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    nodes: Annotated[
        tuple[str, ...], BeforeValidator(_nodes), Field(description=f"any, {_NAMES}")
    ] = ()
    card: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    pack: Annotated[bool, BeforeValidator(_pack)] = False
    preempt: bool = False
    hours: Annotated[tuple[int, int] | None, BeforeValidator(_hours)] = None
    cwd: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    env: Annotated[dict[str, str], BeforeValidator(_env)] = {}  # noqa: RUF012 - pydantic copies it
    python: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    time_limit: Annotated[float | None, BeforeValidator(_seconds)] = None
    grace: Annotated[float, BeforeValidator(_seconds)] = CommandSpec(argv=()).grace_s


class Stop(Section):
    """When members of a sweep are compared; the numbers are optimiser steps."""

    rule: Literal["asha", "none"] = "asha"
    metric: Annotated[str, Field(min_length=1, max_length=64)] = "loss"
    mode: Literal["min", "max"] = "min"
    first: Annotated[int, Field(ge=1)] | None = None
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    last: Annotated[int, Field(ge=1)] | None = None
    """`None`: the number of steps of each member."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Refuse a rule without a first milestone, or with a last one before it."""
        if self.rule != "none" and self.first is None:
            raise ValueError("has no first milestone; valid: first: a number of optimiser steps")
        if self.last is not None and self.last < (self.first or 0):
            raise ValueError(
                f"last {self.last} is before first {self.first}; valid: first at most last"
            )
        return self


class Interval(Section):
    """An interval of values for random and optuna sweeps; both bounds are included."""

    log: _Bounds | None = None
    """Log-uniform: each power of ten is equally likely."""
    uniform: _Bounds | None = None
    integer: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        """Refuse several forms at once, and an empty interval."""
        if len(self.model_fields_set) != 1:
            raise ValueError("has several forms, or none; valid: one of log, uniform and integer")
        kind, (low, high) = self.form
        if low >= high or (kind == "log" and low <= 0):
            least = "above 0 and " if kind == "log" else ""
            raise ValueError(f"{kind} has to begin {least}below {high}; valid: [lower, upper]")
        return self

    @property
    def form(self) -> tuple[str, list[Any]]:
        """The kind of interval, and its bounds."""
        (kind,) = self.model_fields_set
        return kind, getattr(self, kind) or [0, 0]


class Sweep(Section):
    """A rule that makes jobs."""

    method: Literal["grid", "random", "list", "optuna"] = "grid"
    over: Annotated[
        Annotated[_Keys, Tag("keys")] | Annotated[_Rows, Tag("rows")],
        Discriminator(lambda over: "rows" if isinstance(over, list) else "keys"),
        Field(description="KEY: [values]; for method list, a list of mappings KEY: value"),
    ]
    """Method grid: lists of values; random and optuna: lists or intervals; list: mappings."""
    count: Annotated[int, Field(ge=1, le=MAX_JOBS)] | None = None
    """Number of members for methods random and optuna."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0

    @model_validator(mode="after")
    def _of_method(self) -> Self:
        """Refuse keys that belong to another method, and too many jobs."""
        method, is_drawn = self.method, self.method in {"random", "optuna"}
        if isinstance(self.over, list) != (method == "list"):
            valid = "[{lr: 1e-4, batch: 8}, …]" if method == "list" else "KEY: [values]"
            raise ValueError(f"over does not fit method {method}; valid: {valid}")
        if method == "grid" and any(kind != "choice" for kind, _ in self.ranges.values()):
            raise ValueError("has an interval; valid: lists, or method: random with a count")
        if (self.count is not None) != is_drawn:
            text = f"has no count for method {method}" if is_drawn else "has a count"
            raise ValueError(f"{text}; valid: a count with the methods random and optuna alone")
        if self.size > MAX_JOBS:
            size = f"{self.size:,}" if self.size < 10**18 else "over 10^18"
            raise ValueError(f"makes {size} jobs; valid: 1 to {MAX_JOBS:,} jobs")
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The mappings of method list."""
        return self.over if isinstance(self.over, list) else []

    @property
    def ranges(self) -> dict[str, tuple[str, list[Any]]]:
        """Kind, and bounds or choices, of each key; empty for method list."""
        over = self.over if isinstance(self.over, dict) else {}
        return {
            key: ("choice", it) if isinstance(it, list) else it.form for key, it in over.items()
        }

    @property
    def size(self) -> int:
        """The number of jobs that the sweep makes."""
        if self.count is not None:
            return self.count
        if self.method == "list":
            return len(self.rows)
        return math.prod(len(values) for _, values in self.ranges.values())

    def cells(self) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
        """Yield the path below `sweep` and the values of each swept key; for method list, of each
        key of each row.
        """
        for n, row in enumerate(self.rows):
            yield from ((("over", str(n), key), [value]) for key, value in row.items())
        yield from ((("over", key), values) for key, (_, values) in self.ranges.items())


_StopOrNull: TypeAlias = Annotated[
    Stop | None, Field(description="a mapping, such as {first: 500, factor: 3}")
]


class Entry(Shared):
    """One entry of `jobs`: a training or a command, once or as a sweep."""

    name: Name
    train: Annotated[
        dict[str, Any] | None, Field(description="a mapping with keys of train:, such as preset")
    ] = None
    command: Annotated[
        tuple[str, ...] | None, BeforeValidator(_argv), Field(description=_COMMAND)
    ] = None
    cap: bool = True
    parks: bool = False
    outputs: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = ()
    memory_gib: Gib | None = None
    sweep: Annotated[
        Sweep | None, Field(description="a mapping, such as {over: {lr: [1e-4, 3e-4]}}")
    ] = None
    stop: _StopOrNull = None
    after: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    after_any: Annotated[
        tuple[str, ...], BeforeValidator(_names), Field(description=f"{_NAMES}; however those end")
    ] = ()
    each: bool = False

    @model_validator(mode="after")
    def _together(self) -> Self:
        """Refuse keys that exclude each other."""
        if (self.train is None) == (self.command is None):
            what = "neither train nor command" if self.train is None else "train and command"
            raise ValueError(f"has {what}; valid: one of them")
        if self.train is not None:
            wrong = [key for key in _OF_COMMANDS if key in self.model_fields_set]
            if wrong:
                raise ValueError(
                    f"has {', '.join(wrong)}, which a command may have and a training has not; "
                    "valid: command, or train without it"
                )
        if self.after and self.after_any:
            raise ValueError("has after and after_any; valid: one of them")
        if self.each and self.sweep is not None:
            raise ValueError("has each and sweep; valid: one of them")
        if self.each and not self.leads:
            raise ValueError("has each without after; valid: after: the name of a sweep")
        return self

    @property
    def leads(self) -> tuple[str, ...]:
        """Names of the jobs and sweeps that the entry comes after."""
        return self.after or self.after_any

    def texts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield each text that may contain `{NAME.dir}` or `{KEY}`, with its path in the entry."""
        yield from ((("command",), word) for word in self.command or ())
        for key in ("env", "train"):
            for name, text in (getattr(self, key) or {}).items():
                yield (key, name), text if isinstance(text, str) else ""
        yield ("cwd",), self.cwd or ""


class Document(Section):
    """A whole job file."""

    defaults: Shared = Shared()
    stop: _StopOrNull = None
    jobs: Annotated[list[Entry], Field(min_length=1, description="a list with at least one entry")]

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries, completed with `defaults` and `stop` of the file."""
        return tuple(map(self._whole, self.jobs))

    def _whole(self, entry: Entry) -> Entry:
        unsaid = Shared.model_fields.keys() - entry.model_fields_set
        whole: dict[str, object] = {key: getattr(self.defaults, key) for key in unsaid}
        whole["env"] = {**self.defaults.env, **entry.env}
        # Milestones compare members of a sweep, so a single job does not inherit `stop`.
        whole["stop"] = entry.stop or (self.stop if entry.sweep else None)
        return entry.model_copy(update=whole)


#: Keys that only an entry with a command may have.
_OF_COMMANDS: Final = ("cwd", "env", "python", "time_limit", "grace", "cap", "parks", "outputs")
