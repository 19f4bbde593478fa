"""Writes the curves of a run's trainings: a CSV for each slot and, where tensorboard is installed,
its event files.

Loss and speed are those of the store, which samples them about once a second, so steps between two
samples are left out; figures of validation are all there.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from orchestrator.errors import UsageError
from orchestrator.record.history import Curve, training_curves

_NAME: Final = "curves.csv"


def write_curves(folder: Path, to: Path) -> Iterator[str]:
    """Write the curves of a run folder below `to`, and yield what is to be told.

    Raises:
        UsageError: The run has trained nothing, or `to` cannot be written.
    """
    curves = training_curves(folder)
    if not curves:
        raise UsageError(f"run {folder.name} has no optimiser step of a training")
    places = {to / slot.replace("/", "-"): curve for slot, curve in curves.items()}
    try:
        for place, curve in places.items():
            place.mkdir(parents=True, exist_ok=True)
            keys = dict.fromkeys(key for point in curve.values() for key in point)
            with (place / _NAME).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, ["step", *keys])
                writer.writeheader()
                writer.writerows({"step": step, **point} for step, point in curve.items())
            yield str(place / _NAME)
        for place, curve in places.items():
            _write_events(place, curve)
        yield f"their event files: tensorboard --logdir {to}"
    except ModuleNotFoundError:
        yield "for event files of TensorBoard type: pip install tensorboard"
    except OSError as failure:
        raise UsageError(f"{to} cannot be written: {failure}") from failure


def _write_events(place: Path, curve: Curve) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - not a dependency
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - as above
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    writer = EventFileWriter(str(place))
    for step, point in curve.items():
        figures = (Summary.Value(tag=key, simple_value=point[key]) for key in point)
        summary = Summary(value=[figure for figure in figures if figure.tag != "at_unix_s"])
        writer.add_event(Event(wall_time=point["at_unix_s"], step=step, summary=summary))
    writer.close()
