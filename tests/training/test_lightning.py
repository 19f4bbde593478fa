"""Under Lightning's Trainer, docs/examples/lightning_elastic.py equals automatic optimisation."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_child import InChild
from tests.scene import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def fits(folder: str) -> dict[str, Any]:
    """Return the steps, losses, checkpoint name and largest part of each fit."""
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    import lightning
    from lightning_elastic import Net, batches

    os.chdir(folder)
    runpy.run_path(str(EXAMPLES / "lightning_elastic.py"), run_name="__main__")

    class Automatic(Net):  # type: ignore[misc]  # examples have no types
        on_train_start = on_save_checkpoint = lambda *_: None

        def __init__(self, dropout: float) -> None:
            super().__init__(dropout)
            self.automatic_optimization = True

        def configure_optimizers(self) -> Any:
            optimizers, (scheduler,) = super().configure_optimizers()
            return optimizers, [{"scheduler": scheduler, "interval": "step"}]

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.loss_of(batch)
            self.log("loss", loss)
            return loss

    class Told(lightning.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_start(self, trainer: Any, net: Any, *_: object) -> None:
            if not net.automatic_optimization:
                net.elastic.most_rows = 1 + 2 * trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: object) -> None:
            self.losses.append(float(trainer.callback_metrics["loss"]))

    def fit(name: str, net: Any, resumed: str | None = None, **keys: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        told = Told()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[told], default_root_dir=Path(folder, name), **keys,
        )  # fmt: skip
        trainer.fit(net, batches(), ckpt_path=resumed)
        return trainer.global_step, told.losses, trainer.checkpoint_callback.best_model_path

    whole, clip = {"max_epochs": 2}, {"gradient_clip_val": 1.0}
    torch.manual_seed(0)
    automatic, elastic = Automatic(0.0), Net(0.0)
    elastic.load_state_dict(automatic.state_dict())
    straight, halved, again = (Net(0.5) for _ in range(3))
    halved.load_state_dict(straight.state_dict())
    half = fit("half", halved, max_epochs=1)
    return {
        "automatic": fit("automatic", automatic, **whole, **clip),
        "elastic": fit("elastic", elastic, **whole),
        "limited": fit("limited", Net(0.0), max_steps=5),
        "straight": fit("straight", straight, **whole),
        "halves": (half, fit("again", again, half[-1], **whole)),
    }


@pytest.fixture(scope="module")
def done(in_child: InChild, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_child(fits, str(tmp_path_factory.mktemp("fits")))


def test_a_trainer_sees_the_steps_of_an_elastic_module(done: dict[str, Any]) -> None:
    """The trainer counts them, writes the same checkpoint, and obeys `max_steps`."""
    steps, losses, checkpoint = done["elastic"]
    assert (steps, Path(checkpoint).name) == (8, "epoch=1-step=8.ckpt")
    assert Path(done["automatic"][2]).name == Path(checkpoint).name
    assert losses == pytest.approx(done["automatic"][1], rel=1e-5)
    assert (done["limited"][0], len(done["limited"][1])) == (5, 5)


def test_an_elastic_module_goes_on_with_its_dropout(done: dict[str, Any]) -> None:
    half, again = done["halves"]
    assert (half[0], again[0]) == (4, 8)
    assert half[1] + again[1] == pytest.approx(done["straight"][1], rel=1e-5)
