"""The script of fake sensors: its models, its refusals, and how it is made ready on this machine.

A value is a number, or a curve: points `[seconds, value]` with straight lines between them, the
last value held. Time zero is the moment of preparation, for all processes. A query that a card's
entry does not mention is not supported by that card. The library that answers from a script is
built from its C source with whatever compiler the machine has, once for each state of the source.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import pynvml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from workers.nvml.fake import SONAME, FakeSensorsError
from workers.readings import Throttle
from workers.settings import FakeSensors

# The sizes of the tables in script.h.
_MAX_CARDS: Final = 16
_MAX_POINTS: Final = 256
_MAX_PROCESSES: Final = 64
_MAX_MISSING: Final = 64


def _as_points(value: Any) -> Any:  # noqa: ANN401 - whatever the JSON holds
    """Take a single number for a curve of one point."""
    if isinstance(value, list):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number or points [[seconds, value], ...] are wanted")  # noqa: TRY004 - pydantic's way
    return [[0.0, value]]


def _as_bits(names: Any) -> Any:  # noqa: ANN401 - whatever the JSON holds
    """Take a list of reasons for the sum of their bits."""
    if not isinstance(names, list):
        raise ValueError("a list of reasons is wanted")  # noqa: TRY004 - pydantic's way
    for name in names:
        if not isinstance(name, str) or name not in Throttle.__members__:
            raise ValueError(
                f"{name!r} is no reason to throttle; valid: {', '.join(Throttle.__members__)}"
            )
    return sum(Throttle[name] for name in set(names))


def _ascending(points: tuple[tuple[float, Any], ...]) -> tuple[tuple[float, Any], ...]:
    """Refuse a curve that goes back in time."""
    for (before_s, _), (at_s, _) in pairwise(points):
        if at_s <= before_s:
            raise ValueError(
                f"the point at {at_s:g} s does not come after the one at {before_s:g} s"
            )
    return points


#: Errors that a question may be answered with, by NVML's names (nvmlReturn_t).
Error: TypeAlias = Literal[
    "not_supported",
    "no_permission",
    "function_not_found",
    "gpu_is_lost",
    "reset_required",
    "unknown",
]

#: Whole numbers up to here are exact, and stay within 64 bits in thousandths too.
_MOST: Final = 2**53

_Number: TypeAlias = Annotated[float, Field(strict=True, ge=-_MOST, le=_MOST)]
_Positive: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=_MOST)]
_Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
_LENGTH: Final = Field(min_length=1, max_length=_MAX_POINTS)
_Curve: TypeAlias = Annotated[
    tuple[tuple[_Positive, _Positive], ...],
    _LENGTH,
    AfterValidator(_ascending),
    BeforeValidator(_as_points),
]
_SignedCurve: TypeAlias = Annotated[
    tuple[tuple[_Positive, _Number], ...],
    _LENGTH,
    AfterValidator(_ascending),
    BeforeValidator(_as_points),
]
_Steps: TypeAlias = Annotated[
    tuple[tuple[_Positive, Annotated[int, BeforeValidator(_as_bits)]], ...],
    _LENGTH,
    AfterValidator(_ascending),
]


#: Longest name the library has room for.
_Function: TypeAlias = Annotated[str, Field(pattern=r"^nvml[A-Za-z0-9_]{1,90}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FakeProcess(_Model):
    """A process that holds memory of a card."""

    pid: Annotated[int, Field(strict=True, gt=0, lt=2**32)] | None = None
    """`null`: the process that asks."""
    used_bytes: _Whole | None
    """`null`: listed without its memory, as under WDDM."""
    under_mps: bool = False


class FakeCard(_Model):
    """What one card is and says. The names are those of `SensorReading` where it has one."""

    name: Annotated[str, Field(pattern=r"^[ -~]{1,95}$")]
    uuid: Annotated[str, Field(pattern=r"^GPU-[0-9a-f-]{1,80}$")]
    repeat_s: Annotated[float, Field(strict=True, gt=0)] | None = None
    """The curves begin again every so many seconds; else their last values hold."""
    lost_after_calls: _Whole | None = None
    """The card is lost after so many questions, counted in each process of its own."""
    lost_for_s: _Positive | None = None
    """And answers again after so many seconds; else never."""
    fails: dict[str, Error] = Field(default_factory=dict)
    """Errors instead of answers, by the key that is asked for."""

    total_bytes: _Whole
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    processes: Annotated[tuple[FakeProcess, ...], Field(max_length=_MAX_PROCESSES)] | None = None
    xids: Annotated[tuple[tuple[_Positive, _Whole], ...], _LENGTH] | None = None
    """`[seconds, Xid]`; a process that starts later is told of the earlier ones too."""
    throttle: _Steps | None = None
    """`[seconds, [names of Throttle]]`; each holds until the next."""
    used_bytes: _Curve = ((0.0, 0.0),)
    reserved_bytes: _Curve = ((0.0, 0.0),)
    """What the driver keeps for itself; told by the second version of NVML's question about memory.
    """
    temperature_c: _Curve | None = None
    slowdown_c: _Curve | None = None
    """Threshold of cards before Ada."""
    margin_c: _SignedCurve | None = None
    """As NVML reports it on Ada and later: to the highest temperature meant for work."""
    slowdown_tlimit_c: _SignedCurve | None = None
    """At which margin the hardware slows down, on Ada and later; negative."""
    memory_temperature_c: _Curve | None = None
    power_w: _Curve | None = None
    """At this moment; a card that only knows an average has `power_average_w` instead."""
    power_average_w: _Curve | None = None
    power_limit_w: _Curve | None = None
    power_limit_default_w: _Curve | None = None
    power_limit_min_w: _Curve | None = None
    power_limit_max_w: _Curve | None = None
    sm_clock_mhz: _Curve | None = None
    sm_clock_max_mhz: _Curve | None = None
    memory_clock_mhz: _Curve | None = None
    memory_offset_mhz: _SignedCurve | None = None
    memory_offset_min_mhz: _SignedCurve | None = None
    memory_offset_max_mhz: _SignedCurve | None = None
    utilisation_pct: _Curve | None = None
    fan_pct: _Curve | None = None
    pcie_generation: _Curve | None = None
    pcie_lanes: _Curve | None = None
    ecc_enabled: bool | None = None
    ecc_errors: _Curve | None = None
    remapped_rows: _Curve | None = None
    persistence_mode: bool | None = None
    compute_mode: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    """0 default, 2 prohibited, 3 exclusive to one process (nvmlComputeMode_t)."""

    @model_validator(mode="after")
    def _fails_what_is_asked(self) -> Self:
        valid = (
            *ANSWERS,
            "set_power_limit",
            "set_memory_offset",
        )  # not asked for, and can fail all the same
        for key in self.fails:
            if key not in valid:
                raise ValueError(
                    f"fails: {key!r} is nothing that is asked for; valid: {', '.join(valid)}"
                )
        return self


#: The keys of a card that answer a question; QUESTIONS in script.h.
ANSWERS: Final = tuple(FakeCard.model_fields)[list(FakeCard.model_fields).index("total_bytes") :]


class Script(_Model):
    """A whole file."""

    about: str | None = None
    """A comment for readers of the file."""
    driver: Annotated[str, Field(pattern=r"^[0-9.]{1,80}$")] | None = None
    cuda_driver: Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]$")] | None = None
    """The newest CUDA that the driver knows, such as 13.0."""
    missing_functions: Annotated[tuple[_Function, ...], Field(max_length=_MAX_MISSING)] = ()
    """Functions of NVML that came after this driver."""
    cards: Annotated[tuple[FakeCard, ...], Field(max_length=_MAX_CARDS)]

    @model_validator(mode="after")
    def _one_card_each(self) -> Self:
        uuids = [card.uuid for card in self.cards]
        for uuid in uuids:
            if uuids.count(uuid) > 1:
                raise ValueError(f"cards: two of them have the uuid {uuid}")
        return self


def read_script(path: Path) -> Script:
    """Read what a person wrote.

    Raises:
        FakeSensorsError: In one line: the file, the key, and what is wrong with it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FakeSensorsError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise FakeSensorsError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except UnicodeDecodeError:
        raise FakeSensorsError(f"{path} is no text in UTF-8") from None
    try:
        return Script.model_validate(data)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise FakeSensorsError(f"{path}: {_in_words(first)}{more}") from None


def _in_words(problem: ErrorDetails) -> str:
    place = problem["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(
        "."
    )
    if problem["type"] == "extra_forbidden":
        key = str(place[-1])
        model: type[_Model] = (
            FakeProcess if "processes" in place else FakeCard if len(place) > 1 else Script
        )
        valid = list(model.model_fields)
        near = get_close_matches(key, valid, n=1)
        return f"{where}: no such key; " + (
            f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"
        )
    message = problem["msg"].removeprefix("Value error, ")
    message = (message[0].lower() + message[1:]).replace("tuple", "list")  # JSON has no tuples
    return f"{where}: {message}" if where else message


_SOURCE: Final = Path(__file__).with_name("fake_nvml.c")
_HEADERS: Final = tuple(
    Path(__file__).with_name(name) for name in ("script.h", "settings.h", "xids.h")
)
_FLAGS: Final = ("-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120.0

#: What does not change between two points: counts, sums of bits, steps of the link.
_STEPS: Final = frozenset(
    {"throttle", "xids", "pcie_generation", "pcie_lanes", "ecc_errors", "remapped_rows"}
)
#: NVML's "not available", in a list of processes.
_NO_BYTES: Final = 2**64 - 1


def prepare(script_path: Path, folder: Path, *, elapsed_s: float = 0.0) -> FakeSensors:
    """Make the fake sensors of a script ready; what comes back is for `workers.nvml.fake.load`, in
    any process of this machine.

    Args:
        script_path: What a person wrote.
        folder: Where the library and the prepared script go; may be one that was used before.
        elapsed_s: How long ago the curves began.

    Raises:
        FakeSensorsError: The script is refused, or the library cannot be built.
    """
    script = read_script(script_path)
    library = build(folder)
    prepared = folder.absolute() / f"{script_path.stem}.sensors"
    fresh = prepared.with_suffix(".fresh")
    fresh.write_text(
        "".join(f"{line}\n" for line in _lines(script, time.monotonic() - elapsed_s)),
        encoding="ascii",
    )
    fresh.replace(prepared)
    return FakeSensors(library_path=str(library), script_path=str(prepared))


def _lines(script: Script, start_s: float) -> Iterator[str]:
    """Write a script as the library reads it; the form is that of `read_line` in script.h.

    The start is by CLOCK_MONOTONIC, which all processes of a machine share and which is never set.
    """
    yield f"start_s {start_s!r}"
    if script.driver is not None:
        yield f"driver {script.driver}"
    if script.cuda_driver is not None:
        major, minor = map(int, script.cuda_driver.split("."))
        yield f"cuda_driver {1000 * major + 10 * minor}"
    for function in script.missing_functions:
        yield f"missing {function}"
    for card in script.cards:
        yield f"card {card.uuid} {card.name}"
        yield from _card_lines(card)


def _card_lines(card: FakeCard) -> Iterator[str]:
    if card.repeat_s is not None:
        yield f"repeat_s {card.repeat_s!r}"
    if card.lost_after_calls is not None:
        yield (
            f"lost {card.lost_after_calls} {-1.0 if card.lost_for_s is None else card.lost_for_s!r}"
        )
    for key, error in card.fails.items():
        yield f"error {key} {getattr(pynvml, f'NVML_ERROR_{error.upper()}')}"
    if card.processes is not None:
        yield "processes"
        for process in card.processes:
            used_bytes = _NO_BYTES if process.used_bytes is None else process.used_bytes
            yield f"process {process.pid or 0} {used_bytes} {int(process.under_mps)}"
    for key in ANSWERS:
        value = getattr(card, key)
        if key == "processes" or value is None:
            continue
        points = value if isinstance(value, tuple) else ((0.0, float(value)),)
        kind = "steps" if key in _STEPS else "lines"
        yield f"curve {key} {kind} " + " ".join(f"{at_s!r} {number!r}" for at_s, number in points)


def build(folder: Path) -> Path:
    """Build the library below `folder`, unless this source was built there before.

    Args:
        folder: Any folder; is made if it is not there. May be shared by processes that build at the
        same time.

    Returns:
        The path of `libnvidia-ml.so.1`, in a folder named after the source.

    Raises:
        FakeSensorsError: There is no compiler, or it refused the source; says how to get one.
    """
    text = b"".join(path.read_bytes() for path in (_SOURCE, *_HEADERS))
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + text).hexdigest()
    library = folder.absolute() / f"nvml-{digest[:12]}" / SONAME
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        fresh = Path(scratch) / SONAME
        command = [*compiler, *_FLAGS, f"-Wl,-soname,{SONAME}", str(_SOURCE), "-o", str(fresh)]
        done = subprocess.run(  # noqa: S603 - CC is the user's own choice
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise FakeSensorsError(
                f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stderr}"
            )
        fresh.replace(library)  # atomic, also if another process builds
    return library


def _compiler() -> list[str]:
    """Return the command of a C compiler: CC with its arguments, or the first usual name."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_for = (
        f"CC names {chosen[0]!r}, which is not there"
        if chosen
        else f"there is no {', '.join(_COMPILERS)}"
    )
    raise FakeSensorsError(
        f"fake sensors are built from C source, and this machine has no C compiler: {looked_for}; "
        f"install one (sudo apt install gcc, sudo dnf install gcc) or set CC to yours"
    )
