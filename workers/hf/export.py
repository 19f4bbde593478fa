"""Writes a trained transformers model as a folder that transformers or peft loads by itself.

`python -m workers.hf.export` reads one request as JSON and answers with one line of JSON: the head,
which asks, never loads torch. Does not locate checkpoints, and never contacts the Hub.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from torch import nn

from workers.files import made_whole
from workers.training.checkpoints import Identity, RefusedError, newest_good
from workers.training.errors import TrainingError
from workers.training.lora import load_weights, merge, new_model, peft_layers
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task, trained_parameters

#: Files that are copied unchanged from the trained folder.
_COPIED: Final = "*token*", "vocab*", "merges.txt", "*piece*", "chat_template*"
_GENERATION: Final = "generation_config.json"

#: Heads that peft saves in full by itself if it knows the kind of model.
_PEFT_HEADS: Final = "classifier", "score"
_PEFT_KINDS: Final = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One export: its source and its target."""

    checkpoints: Sequence[str]
    """Files, in any order; the newest good one is used."""
    settings: Mapping[str, Any]
    """The section `train:` of the run."""
    seed: int
    slot: str
    to: str
    form: str | None
    """`merged`, `adapter`, or `None`: merged if there are adapters."""
    average: bool


def export(request: Request) -> dict[str, Any]:
    """Write the folder; return its step, form, number of bytes, and notes to the user.

    Raises:
        RefusedError: It cannot be written; the text says why and what to do.
        TrainingError: The task of the run cannot be made on this machine.
        OSError: The folder or a file cannot be written.
    """
    path, saved, told = newest_good(map(Path, request.checkpoints))
    settings = TrainSettings.model_validate(dict(request.settings))
    task = find_task(settings, request.seed)
    model = _trained_model(task, settings, saved, path, average=request.average)
    form = "full" if settings.adapter == "none" else request.form or "merged"
    if form == "full" and request.form == "adapter":
        raise RefusedError(f"{request.slot} was trained without adapters; leave out --adapter")
    if form == "merged" and request.form is None:
        told.append("adapters are merged into the weights; --adapter writes them alone, for peft")
    source = Path(settings.model or model.name_or_path).expanduser()

    to = Path(request.to)
    to.parent.mkdir(parents=True, exist_ok=True)
    with made_whole(to) as folder:
        folder.mkdir()
        kept = _COPIED if form == "adapter" else (*_COPIED, _GENERATION)
        if form == "adapter":
            _write_adapter(model, source, folder)
        else:
            if form == "merged" and merge(model):
                model.config.tie_word_embeddings = False
            _restore_config(model, source)
            model.save_pretrained(folder)
        for file in (file for pattern in kept for file in source.glob(pattern) if file.is_file()):
            shutil.copyfile(file, folder / file.name)
        size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    return {"step": saved["step"], "form": form, "bytes": size_bytes, "told": told}


def _trained_model(
    task: TrainTask, settings: TrainSettings, saved: Mapping[str, Any], path: Path, *, average: bool
) -> Any:  # noqa: ANN401 - a model of transformers, which is imported late
    """Return the model with the weights of a checkpoint."""
    from transformers import PreTrainedModel  # noqa: PLC0415 - an extra

    model, state = new_model(task, settings), saved["state"]
    if not isinstance(model, PreTrainedModel):
        raise RefusedError(
            f"train.preset {settings.preset} trains a {type(model).__name__}, and `export` writes "
            f"models of transformers; its weights are in {path}: torch.load(FILE, "
            'weights_only=True)["state"]["weights"]'
        )
    own = Identity.of(task.name, model.state_dict(), saved["identity"]["levers"])
    if difference := own.difference(saved["identity"]):
        raise RefusedError(f"the checkpoint {path} is not used: {difference}")
    load_weights(model, state["weights"])
    if average and not state["average"]:
        raise RefusedError(
            "this training keeps no averaged weights; leave out --average, or set train.ema_decay, "
            "such as 0.999, and train again"
        )
    if average:
        for weight, averaged in zip(trained_parameters(task, model), state["average"], strict=True):
            weight.data.copy_(averaged)
    return model


def _restore_config(model: Any, source: Path) -> None:  # noqa: ANN401 - as above
    """Restore the configuration that a training changes: dropout and the cache."""
    from transformers import AutoConfig  # noqa: PLC0415 - an extra

    if (source / "config.json").is_file():
        original = AutoConfig.from_pretrained(source, local_files_only=True).to_dict()
        for key in (key for key in original if "drop" in key or key == "use_cache"):
            setattr(model.config, key, original[key])


def _write_adapter(model: Any, source: Path, folder: Path) -> None:  # noqa: ANN401 - as above
    """Write the two files of a peft adapter. Modules trained in full beside the adapters, such as a
    fresh head, are saved with them.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - an extra
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    adapted = [name for name, _ in peft_layers(model)]
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    kind = type(model).__name__
    peft_kind = next((_PEFT_KINDS[end] for end in _PEFT_KINDS if kind.endswith(end)), None)
    names = [name for name, _ in model.named_modules()]
    # A pooler may be fresh, and then the base model has none, whether it is trained or frozen.
    heads = {name for name in names if name in _PEFT_HEADS or name.endswith(".pooler")}
    if peft_kind != "SEQ_CLS" or any(_is_inside(name, head) for name in adapted for head in heads):
        # peft saves no head by itself for a kind that it does not know. Here the head has adapters.
        peft_kind, heads = (None if heads else peft_kind), set()
    for name, weight in model.named_parameters(
        remove_duplicate=False
    ):  # tied weights under each name
        first, parent = name.partition(".")[0], name.rpartition(".")[0]
        if weight.requires_grad and ".lora_" not in name and first not in heads:
            heads.add(parent)
    heads -= {name for name in heads if any(_is_inside(name, head) for head in heads - {name})}
    for head in heads:
        if mixed := [name for name in adapted if _is_inside(head, name) or _is_inside(name, head)]:
            raise RefusedError(
                f"{head or 'the model itself'} is trained in full, and the adapter of {mixed[0]} "
                "is in one module with it, which peft cannot load; leave out --adapter"
            )
        weights = model.get_submodule(head).state_dict()
        tensors |= {f"{head}.{name}": weight for name, weight in weights.items()}
    config = copy.copy(model.peft_config["default"])
    config.task_type = peft_kind
    config.base_model_name_or_path = str(source)
    config.modules_to_save = sorted(heads) or None
    config.ensure_weight_tying = _is_head_tied(model) and "lm_head.weight" in tensors
    config.inference_mode = True
    config.save_pretrained(folder)
    # Copies, because safetensors does not write shared memory under two names.
    copies = {name: each.detach().contiguous().clone() for name, each in tensors.items()}
    named = {f"base_model.model.{name}": each for name, each in copies.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def _is_inside(name: str, parent: str) -> bool:
    """Whether the module `name` is `parent` or inside it."""
    return f"{name}.".startswith(f"{parent}.") or not parent


def _is_head_tied(model: nn.Module) -> bool:
    """Whether the weight of `lm_head` has exactly one more name, that of the embeddings."""
    head, weights = getattr(model, "lm_head", None), model.named_parameters(remove_duplicate=False)
    if not isinstance(head, nn.Linear) or len(list(head.parameters())) > 1:
        return False  # peft would leave out the bias
    return sum(weight is head.weight for _, weight in weights) == 2


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `export`, or under `refused` why nothing was written."""
    try:
        return export(Request(**content))
    except (RefusedError, TrainingError, ValidationError) as refusal:
        return {"refused": str(refusal)}
    except ImportError as missing:
        return {"refused": f"{missing}; type: pip install 'oom-orchestrator[hf]'"}
    except OSError as failure:
        why = f"{content['to']} cannot be written: {failure}"
        return {"refused": why, "errno": failure.errno}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(json.load(sys.stdin))), file=output)
