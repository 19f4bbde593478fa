"""A folder of pictures with a CSV of points, trained in the real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.engine.scene import events
from tests.engine.trainings import settings, trained
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from tests.training.test_pictures import drawn_folder
from workers.messages import Verdict


def test_pictures_are_trained_to_the_end(in_child: InChild, tmp_path: Path) -> None:
    folder = drawn_folder(tmp_path, rows=320)
    usual = spec_of(name="train", policy="adaptive", budget_bytes=213 * MIB)
    keys = settings(preset="cnn-small", data=str(folder), seq=None)
    spec = replace(
        usual, run_id="r", workers_on_host=64, workload=replace(usual.workload, settings=keys)
    )
    (report,) = in_child(trained, str(tmp_path), spec, [{"duration_s": 600.0}])
    assert report.verdict is Verdict.DONE, report.reason
    assert not events(report, "not_planned")
    (evaluated,) = events(report, "evaluated")
    assert set(evaluated.detail) == {"step", "validation_loss", "landmark_error_pct"}
