"""The presets `hf-causal` and `hf-pairs` in the real engine: trained, killed, refused in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.scene import events
from tests.engine.trainings import settings, trained
from tests.hf.folders import make_folder
from tests.in_child import InChild
from tests.scene import MIB, ROOT, spec_of
from workers.messages import Report, Verdict
from workers.settings import WorkerSpec

WHOLE = {"duration_s": 600.0}


def spec(**changes: object) -> WorkerSpec:
    usual = spec_of(name="train", policy="adaptive", budget_bytes=213 * MIB)
    keys = {"preset": "hf-causal", "data": str(ROOT / "docs" / "training.md"), **changes}
    return replace(
        usual,
        run_id="r",
        workers_on_host=64,
        workload=replace(usual.workload, settings=settings(**keys)),
    )


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def undisturbed(in_child: InChild, tmp_path_factory: pytest.TempPathFactory, gpt2: str) -> Report:
    (report,) = in_child(trained, str(tmp_path_factory.mktemp("alone")), spec(model=gpt2), [WHOLE])
    return report


def test_a_folder_is_trained_to_the_end(undisturbed: Report) -> None:
    assert undisturbed.verdict is Verdict.DONE, undisturbed.reason
    told = undisturbed.progress
    assert told is not None
    assert (told.train_step, told.saved_step) == (6, 6)
    assert told.tokens_per_s is not None
    (evaluated,) = events(undisturbed, "evaluated")
    assert 5 < evaluated.detail["validation_loss"] < 6.5
