"""Writes the curves of a run's trainings, as a CSV for each slot.

Loss and speed are those of the store, which samples them about once a second, so steps between two
samples are left out; figures of validation are all there.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from orchestrator.errors import UsageError
from orchestrator.record.history import training_curves

_NAME: Final = "curves.csv"


def write_curves(folder: Path, to: Path) -> Iterator[str]:
    """Write the curves of a run folder below `to`, and yield the path of each file.

    Raises:
        UsageError: The run has trained nothing, or `to` cannot be written.
    """
    curves = training_curves(folder)
    if not curves:
        raise UsageError(f"run {folder.name} has no optimiser step of a training")
    for slot, curve in curves.items():
        path = to / slot.replace("/", "-") / _NAME
        keys = dict.fromkeys(key for point in curve.values() for key in point)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, ["step", *keys])
                writer.writeheader()
                writer.writerows({"step": step, **point} for step, point in curve.items())
        except OSError as failure:
            raise UsageError(f"{to} cannot be written: {failure}") from failure
        yield str(path)
