"""The weights of an earlier run, with which a training begins: `train.from`.

`python -m workers.training.earlier` extracts them from checkpoints for the head, which never loads
torch: it reads one request as JSON and answers with one line of JSON. Does not find checkpoints,
and ignores the states of the optimiser.
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
from workers.training.checkpoints import Identity, RefusedError, newest_good, read_file, write_file
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

#: Number of a file with such weights; checkpoints count from 1.
NUMBER: Final = 0

#: Keys of `train:` that define the meaning of the weights of an adapter.
_KEYS: Final = ("adapter", "adapter_rank", "adapter_alpha", "adapter_targets", "head")


def take_out(paths: Iterable[Path], to: Path) -> dict[str, Any]:
    """Write the weights of the newest good checkpoint to `to`; return its step and name, and one
    sentence for each refused file.

    Raises:
        RefusedError: No file can be used.
        OSError: The weights cannot be written.
    """
    path, saved, refused = newest_good(paths)
    levers = {key: saved["identity"]["levers"][key] for key in _KEYS}
    weights = saved["state"]["weights"]
    to.parent.mkdir(parents=True, exist_ok=True)
    write_file(
        to, {"identity": Identity.of("", weights, levers).plain(), "weights": weights}, NUMBER
    )
    return {"step": saved["step"], "name": path.name, "told": refused}


def begun_model(task: TrainTask, settings: TrainSettings, path: Path) -> nn.Module:
    """Make the task's model with the weights of `path`. An adapter is continued, or merged if this
    training trains all weights.

    Raises:
        TaskError: The weights cannot be used, or belong to another model.
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
    """Return the result of `take_out`, or the reason for a refusal under `refused`."""
    try:
        return take_out(map(Path, question["checkpoints"]), Path(question["to"]))
    except RefusedError as refusal:
        return {"refused": str(refusal)}
    except OSError as failure:
        return {"refused": f"{question['to']} cannot be written: {failure}"}


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(json.load(sys.stdin))), file=output)
