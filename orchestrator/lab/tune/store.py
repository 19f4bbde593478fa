"""Where the results of tunings are kept: one folder each below the user's state folder, found again
by what was tuned.

    STATE/tunings/ID/tune.json     header and rows, for `advise`
    STATE/tunings/ID/rounds.jsonl  what was measured so far, for `tune --resume ID`
    STATE/tunings/ID/tuned.yaml    the user's file with the chosen settings

A result holds for one card, driver, torch and model. Whether it still helps another one is for the
reader to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune.rows import Row, row_from
from workers.files import read_small, replace_whole
from workers.learned_limits.store import default_path

SCHEMA: Final = 2
RESULT: Final = "tune.json"

#: A few hundred rows with long reasons.
_MOST_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a result holds for."""

    card: str
    """UUID of the card, or `cpu`."""
    driver: str | None
    torch: str
    model: str
    """The preset, or `matmul`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tuning that is over, or as far as it came."""

    tune_id: str
    subject: Subject
    device_name: str
    """As people know it, such as `NVIDIA GeForce RTX 3090`."""
    created_at: str
    """ISO 8601, UTC."""
    duration_s: float
    rounds: int
    """Of all passes together, without those that were dropped."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rounds that were not counted, by reason."""
    rows: tuple[Row, ...] = ()
    """Each lever alone, then the sets: cumulative, and with one lever left out."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section that was tuned, with the chosen values."""
    choice: str = ""
    """Why, in a sentence."""
    decided: bool = False
    """Whether every lever that could have been chosen was measured well enough to tell."""
    pareto: tuple[str, ...] = ()
    """Names of the rows (`lever=setting`) that nothing beats."""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {"schema": SCHEMA, **asdict(self), "rows": [row.plain() for row in self.rows]}


def tunings_folder() -> Path:
    """Return the folder of all tunings of this user."""
    return default_path().parent / "tunings"


def write(folder: Path, result: Result) -> None:
    """Write the result into the folder of its tuning.

    Raises:
        OSError: It cannot be written.
    """
    replace_whole(folder / RESULT, json.dumps(result.plain(), indent=1, allow_nan=False) + "\n")


def read(folder: Path) -> Result:
    """Read the result in the folder of a tuning.

    Raises:
        UsageError: There is none, or it cannot be read; the sentence names the file.
    """
    path = folder / RESULT
    try:
        return _result_from(json.loads(read_small(path, _MOST_BYTES)))
    except FileNotFoundError:
        raise UsageError(
            f"there is no result of a tuning at {path}; `tune --resume {folder.name}` makes it"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        told = (
            f"{path} cannot be read ({one_line(str(error))[:200]}); remove {folder}, and run "
            "`tune` again"
        )
        raise UsageError(told) from error


def results(folder: Path | None = None) -> list[Result]:
    """Return all results that can be read, the newest first. `None`: those of this user."""
    found = []
    for each in sorted((folder or tunings_folder()).glob(f"*/{RESULT}"), reverse=True):
        try:
            found.append(read(each.parent))
        except UsageError:
            continue  # one file that is damaged hides no other
    return sorted(found, key=lambda result: result.created_at, reverse=True)


def newest(subject: Subject, folder: Path | None = None) -> Result | None:
    """Return the newest result for exactly this card, driver, torch and model."""
    return next((result for result in results(folder) if result.subject == subject), None)


def _result_from(plain: dict[str, Any]) -> Result:
    if plain.pop("schema") != SCHEMA:
        raise ValueError("it is of another version of this program")
    subject, rows = (
        Subject(**plain.pop("subject")),
        tuple(row_from(each) for each in plain.pop("rows")),
    )
    return Result(**{**plain, "pareto": tuple(plain["pareto"])}, subject=subject, rows=rows)
