"""What a tuning says: the rows, the result, where it is kept, and the table for people.

    STATE/tunings/ID/tune.json     header and rows, for `advise`
    STATE/tunings/ID/rounds.json  what was measured so far, for `tune --resume ID`
    STATE/tunings/ID/tuned.yaml    the user's file with the chosen settings

A result holds for one card, driver, torch and model. Whether it still helps another one is for the
reader to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from orchestrator.errors import UsageError, one_line
from orchestrator.view.cells import aligned
from orchestrator.view.phrases import counted
from workers.files import read_small, replace_whole
from workers.learned_limits import default_path
from workers.units import MIB

RESULT: Final = "tune.json"

#: A few hundred rows with long reasons.
_MOST_BYTES: Final = 4 * 2**20

_WORDS: Final = frozenset({"lever", "setting", "interval", "verdict"})
_UNKNOWN: Final = "–"  # noqa: RUF001 - the sign for an unknown value

#: Left out one after the other where a terminal is too narrow; what has no value in any row is left
#: out anyway.
_FIRST_TO_GO: Final = (
    "once s", "pays after", "host MiB", "gap x noise", "TFLOP/s", "MFU %", "samples/s",
)  # fmt: skip

_LONGEST: Final = 40
_LONGEST_IF_NARROW: Final = 18


class LeverVerdict(StrEnum):
    """What a measurement says of "this lever helps"."""

    CONFIRMED = "CONFIRMED"
    NO_EFFECT = "NO EFFECT"
    """The whole interval lies within the resolution around 1.0."""
    REFUTED = "REFUTED"
    """The other direction."""
    BROKEN = "BROKEN"
    """It changes the result of the training more than its parity class allows."""
    UNAVAILABLE = "UNAVAILABLE"
    """This machine or this version cannot run it."""
    UNDECIDED = "UNDECIDED"
    """The budget ended before the interval was narrow enough, or the arm did not live long enough.
    """


class ParityClass(StrEnum):
    """How much of the training's result a lever may change."""

    EXACT = "exact"
    """No bit, or 1e-6 of the loss."""
    NUMERIC = "numeric"
    """A tenth of what another seed changes."""
    OBJECTIVE = "objective"
    """It changes what is trained; validation losses are compared instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """One lever at one setting.

    Its fields are the keys of `tune --json`; `None` means not known.
    """

    lever: str
    """The key of `train:` or `workload:`; of several keys, joined by ` + `."""
    setting: str
    speed_ratio: float | None = None
    """Samples per second divided by the baseline's of the same round, the median over rounds."""
    speed_low: float | None = None
    speed_high: float | None = None
    """With `speed_low` the interval of `speed_ratio`, simultaneous over all rows of a table."""
    peak_bytes: int | None = None
    """The highest use of the device by tensors in the first steps."""
    parity_class: ParityClass | None = None
    loss_gap_noise: float | None = None
    """The gap to the baseline's loss, as a multiple of what another seed changes."""
    verdict: LeverVerdict
    reason: str
    samples_per_s: float | None = None
    """Optimised samples, or tokens where lengths differ; the median. Not given of matmul."""
    tflops: float | None = None
    """Operations of the model, without what is repeated, in 10^12 a second."""
    mfu_pct: float | None = None
    """Those, of what the card is rated for in this number type at its clock."""
    peak_delta_bytes: int | None = None
    """`peak_bytes` less the baseline's."""
    host_bytes: int | None = None
    """Resident memory of the process."""
    host_delta_bytes: int | None = None
    once_s: float | None = None
    """What the first step took beyond another one, such as a compilation."""
    pays_after_s: float | None = None
    """When it has done as much as the baseline; `None` while it is not known to be faster."""

    @property
    def name(self) -> str:
        """As `Candidate.name`."""
        return f"{self.lever}={self.setting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSubject:
    """What a result holds for."""

    card: str
    """UUID of the card, or `cpu`."""
    driver: str | None
    torch: str
    model: str
    """The preset, or `matmul`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """A tuning that is over, or as far as it came."""

    schema: Literal[2] = 2
    tune_id: str
    subject: TunedSubject
    device_name: str
    """As people know it, such as `NVIDIA GeForce RTX 3090`."""
    created_at: str
    """ISO 8601, UTC."""
    duration_s: float
    rounds: int
    """Of all passes together, without those that were dropped."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rounds that were not counted, by reason."""
    rows: tuple[LeverRow, ...] = ()
    """Each lever alone, then the sets: cumulative, and with one lever left out."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section that was tuned, with the chosen values."""
    choice: str = ""
    """Why, in a sentence."""
    decided: bool = False
    """Whether every lever that could have been chosen was measured well enough to tell."""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)


def tunings_folder() -> Path:
    """Return the folder of all tunings of this user."""
    return default_path().parent / "tunings"


def write_result(folder: Path, result: TuningResult) -> None:
    """Write the result into the folder of its tuning; `OSError` if it cannot be written."""
    replace_whole(folder / RESULT, json.dumps(result.plain(), indent=1, allow_nan=False) + "\n")


def read_result(folder: Path) -> TuningResult:
    """Read the result in the folder of a tuning.

    Raises:
        UsageError: There is none, or it cannot be read; the sentence names the file.
    """
    path = folder / RESULT
    try:
        return TypeAdapter(TuningResult).validate_json(read_small(path, _MOST_BYTES))
    except FileNotFoundError:
        raise UsageError(
            f"there is no result of a tuning at {path}; `tune --resume {folder.name}` makes it"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read ({one_line(str(error))[:200]}); remove {folder}, and run "
            "`tune` again"
        ) from error


def read_results() -> list[TuningResult]:
    """Return all results of this user that can be read, the newest first."""
    results = []
    for path in tunings_folder().glob(f"*/{RESULT}"):
        try:
            results.append(read_result(path.parent))
        except UsageError:
            continue  # one file that is damaged hides no other
    return sorted(results, key=lambda one: (one.created_at, one.tune_id), reverse=True)


def result_table(result: TuningResult, width: int | None) -> Iterator[str]:
    """Yield the lines of a result: the rows, then the reasons, then what was chosen.

    Args:
        result: What was measured.
        width: Columns of the terminal; `None`: there is none, and no column is left out.
    """
    subject = result.subject
    yield f"Tuning {result.tune_id}: {subject.model} on {result.device_name}, torch {subject.torch}"
    dropped = ", ".join(f"{count} for {reason}" for reason, count in result.dropped.items())
    rounds = counted(result.rounds, "round")
    yield f"{rounds} in {result.duration_s:.0f} s; dropped: {dropped or 'none'}"
    yield ""
    yield from _fitting(result.rows, width)
    yield ""
    for row in result.rows:
        yield f"{row.lever} {_cut(row.setting, _LONGEST)}: {row.verdict}: {row.reason}"
    yield ""
    yield f"{'Chosen' if result.decided else 'UNDECIDED, and until it is'}: {result.choice}"


def _fitting(rows: Sequence[LeverRow], width: int | None) -> list[str]:
    """Return the table with as many columns as the terminal has room for."""
    cells = [_cells(row, _LONGEST) for row in rows]
    names = [name for name in cells[0] if any(row[name] != _UNKNOWN for row in cells)]
    for left_out in ("", *_FIRST_TO_GO):
        names = [name for name in names if name != left_out]
        lines = _aligned(names, cells)
        if width is None or max(map(len, lines)) <= width:
            return lines
    return _aligned(names, [_cells(row, _LONGEST_IF_NARROW) for row in rows])


def _aligned(names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> list[str]:
    return list(aligned([names, *([row[name] for name in names] for row in cells)], _WORDS))


def _cells(row: LeverRow, longest: int) -> dict[str, str]:
    interval = _UNKNOWN
    if row.speed_low is not None and row.speed_high is not None:
        interval = f"{row.speed_low:.3f} to {row.speed_high:.3f}"
    return {
        "lever": _cut(row.lever, longest),
        "setting": _cut(row.setting, longest),
        "speed x": _number(row.speed_ratio, ".3f"),
        "interval": interval,
        "samples/s": _number(row.samples_per_s, ".4g"),
        "TFLOP/s": _number(row.tflops, ".3g"),
        "MFU %": _number(row.mfu_pct, ".1f"),
        "peak MiB": _mib(row.peak_bytes, row.peak_delta_bytes),
        "host MiB": _mib(row.host_bytes, row.host_delta_bytes),
        "gap x noise": _number(row.loss_gap_noise, ".2g"),
        "once s": _number(row.once_s, ".1f"),
        "pays after": _UNKNOWN if row.pays_after_s is None else _duration(row.pays_after_s),
        "verdict": str(row.verdict),
    }


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else f"{value:{form}}"


def _mib(size_bytes: int | None, more_bytes: int | None) -> str:
    """Return a size with its difference to the baseline's, such as `24.7 (-1.5)`."""
    if size_bytes is None:
        return _UNKNOWN
    more = "" if more_bytes is None else f" ({more_bytes / MIB:+.1f})"
    return f"{size_bytes / MIB:.1f}{more}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "at once"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
