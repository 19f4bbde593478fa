"""The user's own pictures with points: a folder with one CSV, and the pictures that it names.

The first column of the CSV is the file, relative to the folder. Then each point has two columns,
`NAME_x` and `NAME_y`: pixels from the left and the top, of the picture as a viewer shows it. Points
named `left_NAME` and `right_NAME` are a pair, and take each other's place where a picture is
mirrored; without a pair no picture is. How a picture looks depends on seed, row and epoch alone.

Pictures are read when they are used, made grey, and resized to a square. Nothing is cut out of
them: a face must fill its picture.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from workers import oom
from workers.settings import FailureKind
from workers.training.batches import Samples
from workers.training.errors import TaskError
from workers.training.keyed_random import row_keys, uniform
from workers.training.order import Sample
from workers.training.text import evaluated, held_out

EYE_CORNERS: Final = ("left_eye_outer", "right_eye_outer")
"""Points whose distance is the unit of `landmark_error_pct`."""

_OTHER_SIDE: Final = {"left": "right", "right": "left"}

#: The stream of random numbers.
_LOOK: Final = 5

#: By how much a picture gets brighter or darker, and its contrast higher or lower, at most.
_LIGHT: Final = 0.2


class Pictures(Samples):
    """Grey pictures and their points. The last rows are held out, as of a text.

    Raises:
        TaskError: There is no folder, CSV or picture, a row is malformed, or Pillow is
            not installed.
    """

    def __init__(self, folder: str, edge: int, seed: int) -> None:
        """Read the CSV, and look whether all its pictures are there."""
        self._edge, self._seed = edge, seed
        _pillow()
        path = _csv_in(Path(folder).expanduser())
        try:
            content = path.read_bytes()
            rows = csv.reader(content.decode("utf-8-sig").splitlines())
            self.points = _points_of(path, next(rows, []))
            """Their names."""
            self._mirrored = _mirrored(path, self.points)
            self._paths, self._places, sizes = _rows_of(path, rows, len(self.points))
        except OSError as failure:
            raise TaskError(f"train.data: {path} cannot be read: {failure.strerror}") from failure
        except UnicodeDecodeError as failure:
            raise TaskError(f"train.data: {path} is no UTF-8; save it as that") from failure
        except csv.Error as failure:
            _refuse(path, rows.line_num, f"is no CSV ({failure})")
        held = held_out(len(self._paths))
        self._items = held.start
        self._held_out = evaluated(held)
        digest = hashlib.blake2b(content + repr(sizes).encode(), digest_size=8).hexdigest()
        self.fingerprint = f"pictures {digest} {self._items}"
        """What changes with the CSV, the size of a picture's file, or what is held out."""

    @property
    def eye_corners(self) -> list[int]:
        """Return which points are the outer corners of the eyes; none: not both are named."""
        named = set(EYE_CORNERS) <= set(self.points)
        return [self.points.index(name) for name in EYE_CORNERS] if named else []

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some that are never trained on, evenly spread; none: too few for that."""
        return map(self.plain, self._held_out)

    def __getitems__(self, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Return pictures (1, edge, edge) from about 0 to 1, and points (points, 2) from -1 to 1.

        Raises:
            TaskError: A picture cannot be read.
        """
        numbers = torch.tensor([sample.index + self._items * sample.epoch for sample in samples])
        drawn = uniform(row_keys(self._seed, [_LOOK], numbers)[0], 3).tolist()
        return [self._look(each.index, *draws) for each, draws in zip(samples, drawn, strict=True)]

    def plain(self, row: int) -> tuple[Tensor, Tensor]:
        """Return picture and points of a row as they are in the folder."""
        path = self._paths[row]
        try:
            picture, width, height = _grey(path, self._edge)
        except Exception as failure:
            if oom.classify(failure).kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
            raise TaskError(
                f"train.data: {path} cannot be read as a picture ({type(failure).__name__}); "
                "replace it, or take its row out of the CSV"
            ) from failure
        # A pixel's number is that of its middle, half a pixel from its border.
        return picture, (2 * self._places[row] + 1) / torch.tensor([width, height]) - 1

    def _look(self, row: int, side: float, gain: float, shift: float) -> tuple[Tensor, Tensor]:
        picture, points = self.plain(row)
        picture = picture * (1 + _LIGHT * (2 * gain - 1)) + _LIGHT * (2 * shift - 1)
        if self._mirrored is None or side < 0.5:
            return picture, points
        return picture.flip(-1), points[self._mirrored] * torch.tensor([-1.0, 1.0])


def _pillow() -> Any:  # noqa: ANN401 - a module of the library
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise TaskError(
            f"train.data is a folder of pictures, and Pillow is not installed ({error}); type: pip "
            "install 'oom-orchestrator[hf]'"
        ) from error


def _grey(path: Path, edge: int) -> tuple[Tensor, int, int]:
    """Return a picture as (1, edge, edge) from 0 to 1, and its own width and height."""
    pillow = _pillow()
    with pillow.open(path) as opened:
        upright = importlib.import_module("PIL.ImageOps").exif_transpose(opened)
        picture = upright.convert("L")
    small = picture.resize((edge, edge), pillow.Resampling.BILINEAR)
    grey = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return grey.view(1, edge, edge) / 255, picture.width, picture.height


def _csv_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise TaskError(
            f"train.data: there is no folder {folder} on this machine; name one with pictures and "
            "a CSV of their points"
        )
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv")
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:3]) or "none"
        raise TaskError(
            f"train.data: {folder} must hold one CSV beside its pictures, and has {len(found)} "
            f"({names}); leave one there"
        )
    return found[0]


def _points_of(path: Path, header: Sequence[str]) -> list[str]:
    names = [name.strip() for name in header[1:]]
    points = [name.removesuffix("_x") for name in names[::2]]
    if not points or names != [f"{point}_{axis}" for point in points for axis in "xy"]:
        _refuse(path, 1, "must be: file, then NAME_x and NAME_y of each point")
    if len(set(points)) < len(points):
        _refuse(path, 1, "names a point twice")
    return points


def _rows_of(path: Path, rows: Any, count: int) -> tuple[list[Path], Tensor, list[int]]:  # noqa: ANN401
    """Return the pictures, their points (rows, points, 2) in pixels, and the sizes of files."""
    paths, places, sizes = list[Path](), list[Tensor](), list[int]()
    for row in filter(None, rows):
        line: int = rows.line_num
        if len(row) != 1 + 2 * count:
            what = f"has {len(row) - 1} numbers, and {count} points take {2 * count}"
            _refuse(path, line, what)
        try:
            numbers = [float(number) for number in row[1:]]
        except ValueError as failure:
            _refuse(path, line, f"has a place that is no number ({failure})")
        if not all(map(math.isfinite, numbers)):
            _refuse(path, line, "has a place that is NaN or infinite")
        picture = path.parent / row[0].strip()
        if not picture.is_file():
            _refuse(path, line, f"names {row[0]!r}, and there is no such picture")
        paths.append(picture)
        places.append(torch.tensor(numbers).view(-1, 2))
        sizes.append(picture.stat().st_size)
    if not paths:
        _refuse(path, 2, "is missing: there is no row with a picture")
    return paths, torch.stack(places), sizes


def _mirrored(path: Path, points: Sequence[str]) -> Tensor | None:
    """Return which point stands where in a mirrored picture; `None`: there is no pair."""
    others = []
    for point in points:
        side, line, name = point.partition("_")
        other = f"{_OTHER_SIDE.get(side, side)}{line}{name}"
        if other not in points:
            _refuse(path, 1, f"has {point}, and no {other} to swap it with")
        others.append(points.index(other))
    return None if others == list(range(len(points))) else torch.tensor(others)


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    raise TaskError(f"train.data: line {line} of {path} {what}; correct the line")
