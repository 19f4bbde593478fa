"""A pass of torch.profiler that is given up, or that cannot be made, leaves the next one possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.scene import CPU
from workers.training.profiling import StepProfile


def test_a_pass_that_is_given_up_is_made_later(tmp_path: Path) -> None:
    one = StepProfile(2, CPU, tmp_path)
    for step in (5, 6, 7):
        one.begin(step)
        assert one.end(step, finished=False) is None
    one.abandon()
    with torch.profiler.profile():  # there is but one in a process
        torch.ones(4).sum()
    told = []
    for step in (3, 4, 5, 6, 7, 8):
        one.begin(step)
        torch.ones(4).sum()
        told.append(one.end(step + 1, finished=False))
    assert [each is not None for each in told] == [False, False, False, True, False, False]
    assert told[3] is not None
    assert (told[3]["steps"], told[3]["trace"]) == (2, str(tmp_path / "trace.json.gz"))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_training_that_ends_first_has_a_shorter_pass(
    tmp_path: Path,
) -> None:
    short = StepProfile(10, CPU, None)
    (tmp_path / "file").touch()
    nowhere = StepProfile(1, CPU, tmp_path / "file")
    for one, step in ((short, 0), (short, 2)):
        one.begin(step)
        torch.ones(4).sum()
    told = short.end(4, finished=True)
    assert told is not None
    assert told["steps"] == 2
    assert "trace" not in told
    nowhere.begin(0)
    nowhere.begin(2)
    with pytest.raises(FileExistsError):
        nowhere.end(3, finished=False)
    nowhere.begin(4)
    assert nowhere.end(9, finished=True) is None
