"""The weights that an earlier run has trained, with which a training begins: `train.from`.

`python -m workers.training.earlier` takes them out of checkpoints for the head, which never loads
torch: it reads one request as JSON and answers with one line of JSON. Does not find checkpoints,
and takes over no state of an optimiser.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from workers.training import lora
from workers.training.checkpoints import (
    Identity,
    RefusedError,
    newest_good,
    read_file,
    write_file,
)
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

#: Of a file with such weights; those of checkpoints count from 1.
NUMBER: Final = 0

#: Keys of `train:` that say what the weights of an adapter mean.
_KEYS: Final = ("adapter", "adapter_rank", "adapter_alpha", "adapter_targets", "head")


def take_out(paths: Iterable[Path], to: Path) -> dict[str, Any]:
    """Write the weights of the newest good checkpoint; return its step and name, and a sentence for
    each that was refused.

    Raises:
        RefusedError: No file can be used.
        OSError: They cannot be written.
    """
    path, saved, told = newest_good(paths)
    levers = {key: saved["identity"]["levers"][key] for key in _KEYS}
    weights = saved["state"]["weights"]
    to.parent.mkdir(parents=True, exist_ok=True)
    write_file(
        to, {"identity": Identity.of("", weights, levers).plain(), "weights": weights}, NUMBER
    )
    return {"step": saved["step"], "name": path.name, "told": told}


def begun_model(task: TrainTask, settings: TrainSettings, path: Path) -> nn.Module:
    """Make the task's model with such weights: an adapter goes on, or is merged into the weights
    where all of them are trained.

    Raises:
        TaskError: They cannot be used, or are those of another model.
    """
    try:
        return _begun(task, settings, read_file(path))
    except RefusedError as refusal:
        raise TaskError(f"train.from: {settings.start} is not used: {refusal}") from refusal


def _begun(task: TrainTask, settings: TrainSettings, saved: Mapping[str, Any]) -> nn.Module:
    levers, then = saved["identity"]["levers"], settings
    if settings.adapter == "none":
        then = settings.model_copy(update={key: ast.literal_eval(levers[key]) for key in levers})
    for key, value in levers.items():
        if value != (own := repr(getattr(then, key))):
            raise RefusedError(f"it was trained with {key}={value}, and this run has {key}={own}")
    model = lora.new_model(task, then)
    if difference := Identity.of("", model.state_dict(), levers).difference(saved["identity"]):
        raise RefusedError(difference)
    lora.load_weights(model, saved["weights"])
    if then.adapter == settings.adapter:
        return model
    if lora.merge(model):
        raise RefusedError("an adapter of it is on a layer that shares its weight with another")
    merged, model = model, lora.new_model(task, settings)
    model.load_state_dict(merged.state_dict())
    return model


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return what `take_out` does, or under `refused` why it does nothing."""
    try:
        return take_out(map(Path, question["checkpoints"]), Path(question["to"]))
    except RefusedError as refusal:
        return {"refused": str(refusal)}
    except OSError as failure:
        return {"refused": f"{question['to']} cannot be written: {failure}"}


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(json.load(sys.stdin))), file=output)
