"""The user's own pictures: positions of points, changes by an epoch, and refusals."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from tests.scene import ROOT
from tests.training.picture_folder import LEFT, RIGHT, drawn_folder
from tests.training.scene import CPU, replay
from workers.training.errors import TaskError
from workers.training.memory_plan import answer
from workers.training.order import Sample
from workers.training.pictures import Pictures
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

EDGE = 64


def brightness_at(picture: Tensor, point: Tensor) -> float:
    across, down = ((point + 1) * EDGE / 2).long().tolist()
    return float(picture[0, down, across])


def looks(pictures: Pictures, index: int, epochs: int = 16) -> list[tuple[Tensor, Tensor]]:
    return pictures.__getitems__([Sample(epoch, epoch, index) for epoch in range(epochs)])


def settings(folder: Path, **keys: object) -> TrainSettings:
    usual = {"preset": "cnn-landmarks", "data": str(folder), "batch": 8, "precision": "fp32"}
    return TrainSettings(**(usual | {"steps": 30} | keys))  # type: ignore[arg-type]


def test_points_are_scaled_with_their_picture(tmp_path: Path) -> None:
    pictures = Pictures(str(drawn_folder(tmp_path)), 0)
    for index in range(4):
        picture, points = pictures._sample(index)
        assert picture.shape == (1, EDGE, EDGE)
        # The centre of pixel 8 of 64 is 8.5 pixels from the border.
        assert points[0].tolist() == pytest.approx([(8.5 + 4 * index) / 32 - 1, 8.5 / 16 - 1])
        assert brightness_at(picture, points[0]) == pytest.approx(LEFT / 255, abs=0.1)
        assert brightness_at(picture, points[1]) == pytest.approx(RIGHT / 255, abs=0.1)


def test_a_mirrored_picture_swaps_left_and_right(tmp_path: Path) -> None:
    pictures = Pictures(str(drawn_folder(tmp_path)), 0)
    found = looks(pictures, 1)
    assert all(points[0, 0] < points[1, 0] for _, points in found)
    mirrored = 0
    for picture, points in found:
        dots = [brightness_at(picture, point) for point in points]
        assert max(dots) / min(dots) > 1.4  # both points lie on dots
        mirrored += dots[0] < dots[1]
    assert 3 <= mirrored <= 13


def test_without_pairs_no_picture_is_mirrored(tmp_path: Path) -> None:
    pictures = Pictures(str(drawn_folder(tmp_path, header="file,a_x,a_y,b_x,b_y")), 0)
    assert len({tuple(points.flatten().tolist()) for _, points in looks(pictures, 1)}) == 1


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "line 1 of .*points.csv must be: file, then NAME_x and NAME_y"),
        (["file,a_x,a_y,b_x"], "line 1 .* must be: file, then"),
        (["file,a_x,a_y,a_x,a_y"], "line 1 .* names a point twice"),
        (["file,left_a_x,left_a_y"], "line 1 .* has left_a, and no right_a to swap it with"),
        (["file,a_x,a_y"], "line 2 .* is missing: there is no row"),
        (["file,a_x,a_y", "0.png,1,2", "0.png,1"], "line 3 .* has 1 numbers, and 1 points take 2"),
        (["file,a_x,a_y", "", "0.png,1,x"], r"line 3 .* no finite number \(x\)"),
        (["file,a_x,a_y", "0" * 200_000], "line 2 .* is no CSV"),
        (["file,a_x,a_y", "0.png,1,nan"], "line 2 .* no finite number"),
        (["file,a_x,a_y", "9.png,1,2"], "line 2 .* names '9.png', and there is no such picture"),
    ],
)
def test_a_malformed_csv_is_refused_by_line(
    tmp_path: Path, lines: list[str], sentence: str
) -> None:
    drawn_folder(tmp_path)
    (tmp_path / "points.csv").write_text("\n".join(lines))
    with pytest.raises(TaskError, match=sentence) as refused:
        find_task(settings(tmp_path), 0)
    assert "\n" not in str(refused.value)


def test_a_folder_with_two_csvs_or_none_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(TaskError, match=r"must be a folder .* and has 0 CSVs \(none\)"):
            find_task(settings(folder), 0)
    (drawn_folder(tmp_path) / "more.CSV").touch()
    with pytest.raises(TaskError, match=r"has 2 CSVs \(more.CSV, points.csv\)"):
        find_task(settings(tmp_path), 0)


def test_a_picture_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    whole = (drawn_folder(tmp_path) / "1.png").read_bytes()
    pictures = Pictures(str(tmp_path), 0)
    for content in (b"no picture", whole[: len(whole) - 30]):
        (tmp_path / "1.png").write_bytes(content)
        with pytest.raises(TaskError, match=r"1.png cannot be read as a picture"):
            pictures._sample(1)


def test_running_out_of_memory_is_not_a_bad_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = Pictures(str(drawn_folder(tmp_path)), 0)

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("workers.training.pictures._grey", fails)
    with pytest.raises(MemoryError):
        pictures._sample(1)


def test_without_a_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(TaskError, match=r"pip install 'oom-orchestrator\[hf\]'"):
        find_task(settings(tmp_path), 0)


def test_pictures_that_are_on_another_pc_are_no_mistake() -> None:
    train = {"preset": "cnn-landmarks", "data": "/not/here"}
    told = answer({"settings": train, "seed": 0, "caps": [{"cap_bytes": 2**30, "device": "cpu"}]})
    assert told == {"not_planned": "train.data: /not/here is not on this machine"}


def test_other_rows_or_other_pictures_are_other_data(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return Pictures(str(tmp_path), 0).fingerprint

    drawn_folder(tmp_path)
    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes() + b" ")
    second = fingerprint()
    drawn_folder(tmp_path, rows=5)
    assert len({first, second, fingerprint()}) == 3


def test_a_training_on_pictures_gets_better(tmp_path: Path) -> None:
    keys = settings(drawn_folder(tmp_path, rows=320), lr=3e-3)
    task = find_task(keys, 0)
    assert len(task.dataset) == 288
    run = Trainer(task, keys, CPU, 0)
    before = run.evaluate()
    replay(run, [[3, 0, 3 * 30]])
    after = run.evaluate()
    assert run.finished
    assert not run.hazards, "as of BatchNorm"
    assert after["validation_loss"] < 0.7 * before["validation_loss"]


def test_the_documented_folder_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"```\n(file,.*?)```", page, re.DOTALL)
    picture = tmp_path / table.splitlines()[1].partition(",")[0]
    picture.parent.mkdir()
    Image.new("L", (400, 400)).save(picture)
    (tmp_path / "points.csv").write_text(table)
    pictures = Pictures(str(tmp_path), 0)
    assert pictures.points == ["left_eye_outer", "right_eye_outer", "nose"]
    _, points = pictures.__getitems__([Sample(0, 0, 0)])[0]
    assert points.shape == (3, 2)
