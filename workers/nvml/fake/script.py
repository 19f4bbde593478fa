"""The script of fake sensors as a person writes it, in JSON: its models, and the refusals.

A value is a number, or a curve: points `[seconds, value]` with straight lines between them, the
last value held. Time zero is the moment of preparation, for all processes. A query that a card's
entry does not mention is not supported by that card. Does not pass the script to the library
(`prepare` does).
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

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

from workers.nvml.fake.library import FakeSensorsError
from workers.readings import Throttle

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
    """As NVML reports it on Ada and later: to the highest temperature that the card is meant to
    work at.
    """
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
