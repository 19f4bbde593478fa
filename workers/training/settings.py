"""The `train:` section of cluster.yaml as one frozen model.

Does not load torch, so that the head can read it, too. The module that uses a key says what it
does.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16"]
Documents: TypeAlias = Literal["windows", "files", "lines"]

#: Valid for `preset`, besides the user's own `package.module:name`.
PRESETS: Final = (
    "gpt-nano", "gpt-mini", "gpt2-small", "gpt2-medium", "gpt-1b", "cnn-landmarks",
)  # fmt: skip

#: Presets that need a folder of pictures, with the function that makes the task.
PICTURE_PRESETS: Final = {"cnn-landmarks": "workers.training.pictures:pictures_task"}

#: Presets that train the model of a local folder, with the function that makes the task.
FOLDER_PRESETS: Final = {
    "hf-causal": "workers.hf.causal:causal_task",
    "hf-pairs": "workers.hf.pairs:pairs_task",
}

_Start: TypeAlias = Annotated[str, Field(pattern=r"^\d[\w-]*(?:/[A-Za-z0-9][\w.-]*)+$")]

#: A step in which torch compiles took 22 to 47 s on an idle PC (ml-engineering, torch 2.13). This
#: is ten times as long: workers compile at the same time, with one thread each.
_COMPILE_STEP_S: Final = 600.0

#: Removed keys, each with its former default and what to do instead. A key with its former default
#: is ignored, so that earlier runs can be exported and continued.
_REMOVED_KEYS: Final[dict[str, tuple[object, str]]] = {
    "attention": ("auto", "torch takes the fastest kernel that can run"),
    "channels_last": ("auto", "pictures have that order on a card, in bf16 and fp16"),
    "cudnn_benchmark": (False, "cuDNN's search is tried where train.micro is a number"),
    "compile_mode": ("default", "train.compile is torch.compile's default mode"),
    "min_seq": (None, "train.documents, with text of your own, has samples of unequal length"),
    "non_blocking": (True, "pinned batches are always copied while the card computes"),
    "persistent": (True, "the loader's processes always stay"),
    "ram_cache": (False, "samples are prepared once, in a file that the system keeps in free RAM"),
    "set_to_none": (True, "gradients are always set to none"),
    "start_method": ("forkserver", "a fork server always starts the loader's processes"),
}

#: Removed keys that are in the fingerprint of older checkpoints.
_REMOVED_IN_FINGERPRINT: Final = {
    key: repr(_REMOVED_KEYS[key][0]) for key in ("attention", "channels_last")
}

#: Keys that do not change what is trained: a checkpoint made with other values can be continued.
#: `documents` does change it, but is in the fingerprint of the text, and so absent from that of a
#: training without text.
_NOT_IN_FINGERPRINT: Final = {
    "slots", "team", "split", "documents",
    "steps", "epochs", "validate_every", "micro", "recompute",
    "states_on_host", "compile", "loader_workers", "prefetch", "pin",
    "activations_on_host", "ema_on", "save_every_s", "checkpoints",
}  # fmt: skip


#: Keys that need the whole model in one process, each with the value that does not need it.
_NEED_WHOLE_MODEL: Final = {"start": None, "compile": "off", "ema_decay": None, "layer_decay": 1.0}


class RemovedKeyError(ValueError):
    """A removed key with another value than its former default."""

    def __init__(self, key: str, instead: str) -> None:
        """Store the key, and build the message from what to do instead."""
        super().__init__(f"is no key any more; valid: leave it out: {instead}")
        self.key = key


def _valid_preset(preset: str) -> str:
    names = (*PRESETS, *FOLDER_PRESETS)
    if preset not in names and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", preset):
        raise ValueError(
            f"there is no preset {preset!r}; valid: {', '.join(names)}, or your own as "
            "package.module:name"
        )
    return preset


def _false_as_off(value: object) -> object:
    return "off" if value is False else value  # YAML reads off as false


def _refuse_if(broken: object, sentence: str) -> None:
    if broken:
        raise ValueError(sentence)


class TrainSettings(BaseModel):
    """One training. `None` means: the default of the preset, or off."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    preset: Annotated[str, AfterValidator(_valid_preset)] = "gpt-nano"
    model: Annotated[str, Field(min_length=1)] | None = None
    """The model folder of the presets `hf-causal` and `hf-pairs`."""
    start: _Start | None = Field(
        default=None, alias="from", description="RUN_ID/SLOT of an earlier run"
    )
    """`train.from`: the slot whose weights the training begins with; `None`: preset or folder."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Number of slots that train, each with its own seed. `None`: the first one if the
    preset trains a folder, else all.
    """
    team: Literal["all"] | list[Annotated[str, Field(min_length=1)]] | None = None
    """PCs or slots that share one training; `all`: every PC. `None`: each slot trains alone."""
    split: Literal["data", "auto", "layers"] = "data"
    """What the members of a team divide: `data`, the samples of each optimiser step; `auto`: them
    as well, unless the fastest member alone is measured to be about as fast; `layers`: the blocks
    of a model that fits on no single card.
    """
    weights: Literal["fp32", "as-stored", "nf4"] = "fp32"
    """Type of the folder's weights: fp32 masters, as stored, or 4 bits below adapters."""
    head: Literal["auto", "train", "frozen"] = "auto"
    """With an adapter: whether the folder's head is trained, too. `auto`: only for `hf-pairs`."""
    columns: list[Annotated[str, Field(min_length=1)]] | None = None
    """`hf-pairs`: columns of one or two texts, then of the label; `None`: the usual names."""
    labels: Literal["auto", "classes", "numbers", "text"] = "auto"
    """`hf-pairs`: type of the labels; `auto`: numbers if one of them has a fraction. `text` needs
    an encoder-decoder, which writes it.
    """
    data: Annotated[str, Field(min_length=1)] | None = None
    """File or folder of text to train on, or folder of pictures; `None`: synthetic text."""
    validation: Annotated[str, Field(min_length=1)] | None = None
    """Folder presets: data for validation, as in `data`; `None`: the last 1 % of `data`."""
    validate_every: Annotated[int, Field(ge=1)] | None = None
    """Optimiser steps between validations; `None`: validation only at the end."""
    documents: Documents = "windows"
    """What a sample of the text is: a window of `seq` bytes, or a document of up to `seq`."""
    steps: Annotated[int, Field(ge=1)] = 200
    """Optimiser steps of the training, unless `epochs` is set."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1, le=1_048_576)] = 16
    """Effective batch: samples of each optimiser step, whatever memory there is."""
    micro: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Most samples computed at once."""
    exact: bool = False
    """Adapt only what changes no bit: the number of recomputed blocks, not the micro-batch."""
    seq: Annotated[int, Field(ge=2, le=1_048_576)] | None = None
    """Tokens of a sample."""
    bucketing: bool = False
    """Batches of documents of similar length."""
    packing: bool = False
    """Rows of several documents, up to `seq` tokens each. `batch` and `micro` then count rows."""
    lr: Annotated[float, Field(gt=0)] | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label's weight that is spread over all classes."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate of a block, as a share of that of the next block."""
    r_drop: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence between two passes with different dropout (R-Drop)."""
    activations_on_host: bool = False
    """Keep saved activations in host memory."""
    precision: Precision = "bf16"
    recompute: Literal["auto", "none", "all"] | Annotated[int, Field(ge=0)] = "auto"
    """Number of blocks that recompute their activations in the backward pass."""
    compile: Annotated[Literal["off", "block", "model"], BeforeValidator(_false_as_off)] = "off"
    """Unit that torch.compile compiles."""
    optimizer: Literal["adamw-fused", "adamw-foreach", "adamw-loop", "adamw-8bit"] = "adamw-fused"
    states_on_host: Literal["auto"] | Annotated[int, Field(ge=0, le=100)] = 0
    """Per cent of the optimiser states in host memory; they move to the device for the update."""
    adapter: Literal["none", "lora", "dora"] = "none"
    """What is trained instead of the model's own weights."""
    adapter_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    adapter_alpha: Annotated[float, Field(gt=0)] | None = None
    """The output of an adapter is scaled by this, divided by the rank; `None`: twice the rank."""
    adapter_targets: list[Annotated[str, Field(min_length=1)]] | None = None
    """Endings of the names of the layers that get adapters; `None`: all possible layers."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the moving average of the weights."""
    ema_on: Literal["device", "host"] = "device"
    loader_workers: Annotated[int, Field(ge=0, le=256)] = 0
    prefetch: Annotated[int, Field(ge=1, le=64)] = 2
    pin: Literal["auto"] | bool = "auto"
    save_every_s: Annotated[float, Field(gt=0)] = 60.0
    checkpoints: Literal["node", "head"] = "node"
    deterministic: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_keys(cls, given: object) -> object:
        """Drop removed keys that have their former default, and refuse the others."""
        if not isinstance(given, dict):
            return given
        for key in given.keys() & _REMOVED_KEYS.keys():
            always, instead = _REMOVED_KEYS[key]
            if given[key] != always:
                raise RemovedKeyError(key, instead)
        return {key: value for key, value in given.items() if key not in _REMOVED_KEYS}

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        """Refuse keys that exclude each other."""
        _refuse_if(
            self.exact and self.micro == "auto",
            "exact: true keeps the part of a batch that is computed at once, and micro: auto "
            "changes it; valid: also set train.micro to a number of samples from 1 to "
            f"{self.batch}",
        )
        _refuse_if(
            self.r_drop and not self.dropout,
            f"r_drop: {self.r_drop} compares two passes with different dropout, and dropout: 0.0 "
            "makes them equal; valid: also set train.dropout, such as 0.1",
        )
        _refuse_if(
            self.team is not None and self.slots is not None,
            f"slots: {self.slots} are trainings by themselves, and team makes one training of its "
            "members; valid: one of them",
        )
        _refuse_if(
            self.team is not None and self.r_drop,
            f"r_drop: {self.r_drop} compares two passes over whole batches, and a member of a team "
            "computes a part of each; valid: one of them",
        )
        if self.team is not None and self.split == "layers":
            for key, default in _NEED_WHOLE_MODEL.items():
                _refuse_if(
                    (value := getattr(self, key)) != default,
                    f"split: layers divides the model over two members, which train.{key}: {value} "
                    f"cannot be used with yet; valid: leave it out, or split: data",
                )
        _refuse_if(
            self.exact and self.compile != "off",
            "exact: true promises the same bits at any memory, and where the compiler fails a "
            "training continues without it; valid: compile: off, or exact: false",
        )
        _refuse_if(
            self.bucketing and self.packing,
            "bucketing: true sorts documents by length, and packing: true fills rows with them, so "
            "that all have one length; valid: one of them",
        )
        _refuse_if(
            self.preset in PICTURE_PRESETS and self.data is None,
            f"preset: {self.preset} finds points in pictures of your own; valid: also set "
            "train.data (a folder with pictures and a CSV of their points)",
        )
        _refuse_if(
            self.preset in PRESETS
            and self.preset not in PICTURE_PRESETS
            and self.packing
            and not self.unequal,
            "packing: true fills rows with documents, and samples of one length leave no room; "
            "valid: also set train.data and train.documents (files or lines)",
        )
        _refuse_if(
            self.preset in FOLDER_PRESETS and (self.model is None or self.data is None),
            f"preset: {self.preset} trains a folder of your own on a text of your own; valid: also "
            "set train.model (a folder with config.json) and train.data",
        )
        _refuse_if(
            self.preset in PRESETS and self.model is not None,
            f"model: {self.model} is for preset: hf-causal or hf-pairs, and {self.preset} makes a "
            "model of its own; valid: one of them",
        )
        _refuse_if(
            self.weights == "nf4" and (self.adapter == "none" or self.preset not in FOLDER_PRESETS),
            "weights: nf4 keeps a folder's linear layers in 4 bits, which only adapters can be "
            "trained on; valid: also set train.adapter to lora or dora, with preset: hf-causal or "
            "hf-pairs",
        )
        _refuse_if(
            self.columns is not None and len(self.columns) not in {2, 3},
            "columns names one or two columns of text, and the one of the label; valid: such as "
            "[text, label] or [premise, hypothesis, label]",
        )
        _refuse_if(
            self.documents != "windows" and self.data is None,
            f"documents: {self.documents} is for your own text, and data: null is made text; "
            "valid: documents: windows, or also set train.data",
        )
        _refuse_if(
            self.unequal and self.r_drop,
            "r_drop compares documents of one length, and documents makes others; valid: one of "
            "them",
        )
        return self

    @property
    def most_slots(self) -> int | None:
        """Number of slots that may train; `None`: all, or those of the team."""
        if self.team is not None:
            return None
        return self.slots or (1 if self.preset in FOLDER_PRESETS else None)

    @property
    def searches_kernels(self) -> bool:
        """Whether cuDNN benchmarks its kernels for each new size and uses the fastest. Sizes are
        few then; the choice may differ in the next run.
        """
        return self.micro != "auto" and not (self.exact or self.deterministic)

    @property
    def unequal(self) -> bool:
        """Whether the samples are documents of unequal lengths."""
        return self.documents != "windows"

    @property
    def first_share_pct(self) -> int:
        """Per cent of the states on the host before the memory policy has decided."""
        return 0 if self.states_on_host == "auto" else self.states_on_host

    @property
    def slow_step_s(self) -> float:
        """Longest step in which torch compiles, in seconds; 0: nothing is compiled."""
        return 0.0 if self.compile == "off" else _COMPILE_STEP_S

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that change the training's result, to compare with a checkpoint."""
        values = {
            key: repr(value)
            for key, value in self.model_dump().items()
            if key not in _NOT_IN_FINGERPRINT
        }
        return {**_REMOVED_IN_FINGERPRINT, **values}
