"""The preset `cnn-landmarks`: a CNN that finds points in the user's own pictures, a folder with one
CSV and the pictures that it names.

The first column of the CSV is the file, relative to the folder. Then each point has two columns,
`NAME_x` and `NAME_y`: pixels from the left and the top, of the picture as a viewer shows it. Points
named `left_NAME` and `right_NAME` are a pair: mirroring a picture exchanges them. Without a pair no
picture is mirrored. The augmentation of a picture depends on seed, row and epoch alone.

Pictures are converted to grey and resized to a square, once on a PC, into a file of one byte per
pixel. They are not cropped: a face must fill its picture. The model uses GroupNorm, because the
result of BatchNorm depends on which samples are computed together.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from workers import oom
from workers.training.batches import rows_of
from workers.training.errors import TaskError, optional_library
from workers.training.keyed_random import KeyedDropout, row_keys, uniform
from workers.training.order import Sample
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, Validation
from workers.training.text import HeldOut, finite
from workers.training.token_files import SampleWriter, TokenSamples, written_once

#: Edge of a picture in pixels, and channels of each stage, which halves the edge.
_EDGE: Final = 64
_WIDTHS: Final = (32, 64, 128, 256)

#: Edge of the grid to which the CNN pools before its head.
_CELLS: Final = 4

_OPPOSITE: Final = {"left": "right", "right": "left"}

#: Stream of the random numbers for augmentation.
_AUGMENTATION: Final = 5

#: Largest shift of a picture's values (0 to 1), and largest relative change of its contrast.
_LIGHT: Final = 0.2


def pictures_task(settings: TrainSettings, seed: int) -> TrainTask:
    """Return the task of `train.preset: cnn-landmarks`.

    Raises:
        TaskError: The folder cannot be used.
    """
    pictures = Pictures(str(settings.data), seed)
    return TrainTask(
        name=f"{settings.preset} of {len(pictures.points)} points",
        model=partial(Cnn, _WIDTHS, settings.dropout, len(pictures.points)),
        dataset=pictures,
        fingerprint=pictures.fingerprint,
        loss=landmark_loss,
        evaluate=Validation(
            samples=pictures.validation_samples,
            loss=landmark_loss,
            count=rows_of,
            collate=default_collate,
        ),
        blocks=lambda model: list(model.blocks),  # type: ignore[arg-type]  # of a `Cnn`
        by_sample=True,
        uses=frozenset({"data", "dropout"}),
    )


def landmark_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Sum the mean squared error of coordinates over samples."""
    pictures, points = batch
    predicted: Tensor = model(pictures)
    return (predicted.float() - points).square().mean(dim=(1, 2)).sum()


class Cnn(nn.Module):
    """Finds points in a grey picture."""

    def __init__(self, widths: Sequence[int], dropout: float, points: int) -> None:
        super().__init__()
        pairs = zip((1, *widths[:-1]), widths, strict=True)
        self.blocks = nn.ModuleList(Stage(*pair) for pair in pairs)
        self.dropout = KeyedDropout(dropout)
        self.head = nn.Linear(widths[-1] * _CELLS**2, 2 * points)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return (rows, points, 2): x and y from -1 to 1."""
        x = pictures
        for block in self.blocks:
            x = block(x)
        # Not adaptive pooling: its backward pass on a card is not deterministic.
        x = functional.avg_pool2d(x, x.shape[-1] // _CELLS)
        points: Tensor = self.head(self.dropout(x.flatten(1)))
        return points.view(len(points), -1, 2)


class Stage(nn.Module):
    """Two convolutions: the first halves the edge, the second is a residual branch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # Without biases: the norm that follows removes most of a bias.
        self.halve = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm_halved = nn.GroupNorm(8, outputs)
        self.refine = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_refined = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return feature maps with half the edge."""
        x = functional.gelu(self.norm_halved(self.halve(x)))
        return x + functional.gelu(self.norm_refined(self.refine(x)))


class Pictures(HeldOut):
    """Grey pictures and their points. The last rows are held out, as in a text.

    Raises:
        TaskError: Folder, CSV or a picture is missing, a row is malformed, or there is no Pillow.
    """

    def __init__(self, folder: str, seed: int) -> None:
        """Read the CSV, and check that all its pictures exist."""
        self._seed = seed
        need = "train.data is a folder of pictures, and Pillow is not installed"
        optional_library("PIL.Image", need)
        path = _csv_in(Path(folder).expanduser())
        try:
            content = path.read_bytes()
            rows = csv.reader(content.decode("utf-8-sig").splitlines())
            self.points, self._mirror_order = _points_of(path, next(rows, []))
            self._paths, self._points_px = _rows_of(path, rows, len(self.points))
            sizes = [picture.stat().st_size for picture in self._paths]
        except (OSError, UnicodeDecodeError) as failure:
            raise TaskError(f"train.data: {path} cannot be read as UTF-8: {failure}") from failure
        except csv.Error as failure:
            _refuse(path, rows.line_num, f"is no CSV ({failure})")
        digest = hashlib.blake2b(content + repr(sizes).encode(), digest_size=8).hexdigest()
        self.fingerprint = f"pictures {digest} {len(self)}"
        """Changes with the CSV, the size of a picture's file, and the held-out rows."""

    def __getitems__(self, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Return pictures (1, 64, 64) from about 0 to 1, and points (points, 2) from -1 to 1.

        Raises:
            TaskError: A picture cannot be read.
        """
        numbers = torch.tensor([sample.index + len(self) * sample.epoch for sample in samples])
        drawn = uniform(row_keys(self._seed, [_AUGMENTATION], numbers)[0], 3).tolist()
        return [
            self._augmented(each.index, *draws) for each, draws in zip(samples, drawn, strict=True)
        ]

    def _count(self) -> int:
        return len(self._paths)

    def _sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the picture and the points of a row without augmentation."""
        grey, sizes = self._pixels
        picture = grey[index].view(1, _EDGE, _EDGE) / 255
        # A pixel coordinate is the centre of the pixel, half a pixel from its border.
        return picture, (2 * self._points_px[index] + 1) / sizes[index] - 1

    @cached_property
    def _pixels(self) -> tuple[TokenSamples, TokenSamples]:
        """Grey squares of all pictures, and their original widths and heights."""
        found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self._paths]
        key = ("pictures", _EDGE, found)
        written = written_once(key, {"grey": "uint8", "size": "int32"}, self._write)
        return written["grey"], written["size"]

    def _write(self, greys: SampleWriter, sizes: SampleWriter) -> None:
        for path in self._paths:
            try:
                content, *size = _grey(path)
            except Exception as failure:
                if oom.classify(failure).is_out_of_memory:
                    raise
                raise TaskError(
                    f"train.data: {path} cannot be read as a picture "
                    f"({type(failure).__name__}); replace it, or take its row out of the CSV"
                ) from failure
            for writer, numbers in ((greys, content), (sizes, size)):
                writer.add(numbers)
                writer.end()

    def _augmented(self, row: int, side: float, gain: float, shift: float) -> tuple[Tensor, Tensor]:
        picture, points = self._sample(row)
        picture = picture * (1 + _LIGHT * (2 * gain - 1)) + _LIGHT * (2 * shift - 1)
        if self._mirror_order is None or side < 0.5:
            return picture, points
        return picture.flip(-1), points[self._mirror_order] * torch.tensor([-1.0, 1.0])


def _grey(path: Path) -> tuple[bytes, int, int]:
    """Return the pixels of a picture as a grey square, and its original width and height."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - an extra

    with Image.open(path) as opened:
        picture = ImageOps.exif_transpose(opened).convert("L")
    small = picture.resize((_EDGE, _EDGE), Image.Resampling.BILINEAR)
    return small.tobytes(), picture.width, picture.height


def _csv_in(folder: Path) -> Path:
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() == ".csv")
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:3]) or "none"
        raise TaskError(
            f"train.data: {folder} must be a folder on this machine with pictures and one CSV of "
            f"their points, and has {len(found)} CSVs ({names})"
        )
    return found[0]


def _points_of(path: Path, header: Sequence[str]) -> tuple[list[str], Tensor | None]:
    """Return the names of points, and for each the index of its mirrored point; `None`: no pair."""
    names = [name.strip() for name in header[1:]]
    points = [name.removesuffix("_x") for name in names[::2]]
    if not points or names != [f"{point}_{axis}" for point in points for axis in "xy"]:
        _refuse(path, 1, "must be: file, then NAME_x and NAME_y of each point")
    if len(set(points)) < len(points):
        _refuse(path, 1, "names a point twice")
    others = []
    for point in points:
        side, line, name = point.partition("_")
        other = f"{_OPPOSITE.get(side, side)}{line}{name}"
        if other not in points:
            _refuse(path, 1, f"has {point}, and no {other} to swap it with")
        others.append(points.index(other))
    return points, None if others == list(range(len(points))) else torch.tensor(others)


def _rows_of(path: Path, rows: Any, count: int) -> tuple[list[Path], Tensor]:  # noqa: ANN401
    """Return the paths of the pictures, and their points (rows, points, 2) in pixels."""
    paths, places = list[Path](), list[Tensor]()
    for row in filter(None, rows):
        line: int = rows.line_num
        if len(row) != 1 + 2 * count:
            what = f"has {len(row) - 1} numbers, and {count} points take {2 * count}"
            _refuse(path, line, what)
        try:
            numbers = list(map(finite, row[1:]))
        except ValueError as failure:
            _refuse(path, line, f"has a place that is no finite number ({failure})")
        picture = path.parent / row[0].strip()
        if not picture.is_file():
            _refuse(path, line, f"names {row[0]!r}, and there is no such picture")
        paths.append(picture)
        places.append(torch.tensor(numbers).view(-1, 2))
    if not paths:
        _refuse(path, 2, "is missing: there is no row with a picture")
    return paths, torch.stack(places)


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    raise TaskError(f"train.data: line {line} of {path} {what}; correct the line")
