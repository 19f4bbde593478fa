"""What is trained: a `TrainTask` of model, data set, loss, and optionally optimiser and evaluation.

`train.preset` names a task: a built-in one, or the user's own. A task knows neither the size of a
batch nor how it is split.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from workers.training.batches import Batch, Samples, on_device, rows_of
from workers.training.errors import NotLoadedError, TaskError, TrainingError
from workers.training.host_memory import wait_asleep
from workers.training.keyed_random import bits, row_keys, uniform
from workers.training.models import GPTS, Gpt, GptShape
from workers.training.optimizers import adamw, refuse_closure
from workers.training.sequences import (
    NO_TOKEN,
    PackedRows,
    cross_entropy,
    packed_loss,
    packed_row,
    packed_tokens,
    padded,
    shortened,
)
from workers.training.settings import FOLDER_PRESETS, PICTURE_PRESETS, TrainSettings
from workers.training.text import SAMPLES, TextBytes

#: Keys of `train:` that only a task can implement: data and loss.
OWN_KEYS: Final = (
    "data", "documents", "seq", "packing", "dropout", "label_smoothing", "r_drop",
)  # fmt: skip

#: Default number of samples of synthetic text.
ITEMS: Final = 65_536

#: Number of words of synthetic text, and of letters in each word; a letter is a token.
_WORDS, _LETTERS = 128, 4
#: Streams of random numbers.
_DICTIONARY, _TEXT = range(2)


class Items(Protocol):
    """A data set whose items are read by index, like a map-style `Dataset` of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...  # noqa: ANN401 - an index, or a `Sample`


def trained_parameters(task: TrainTask, model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of a task's model.

    Raises:
        TaskError: There is none.
    """
    if parameters := [parameter for parameter in model.parameters() if parameter.requires_grad]:
        return parameters
    raise TaskError(f"the model of {task.name} has no parameter that is trained")


def refuse_without_data(task: TrainTask) -> None:
    """Raise a `TaskError` if the data set is empty."""
    if len(task.dataset) == 0:
        raise TaskError(f"the data set of {task.name} is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """A training task: model, data, loss and how they are used."""

    name: str
    """Checkpoints of a task with another name are refused."""
    model: Callable[[], nn.Module]
    """Makes the model on the CPU. The caller seeds torch before, and restores its state after."""
    dataset: Items
    loss: Callable[[nn.Module, Batch], Tensor]
    """Sum (or mean, see `loss_is`) of the losses of all items in a part of a batch."""
    loss_is: Literal["sum", "mean"] = "sum"
    """A mean is multiplied by `count` of the part. A loss that is not what this says is refused."""
    count: Callable[[Batch], int] = rows_of
    """Counts the items (samples, tokens) of a batch or part; the summed loss is divided by it."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """Makes the optimiser; `None`: AdamW with the values of the settings."""
    named_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer] | None = None
    """Makes the optimiser from pairs of name and parameter."""
    schedule: Callable[[int], float] | None = None
    """From the step, counted from 0, to a factor of the learning rates; `None`: see settings."""
    uses: frozenset[str] = frozenset()
    """Those of `OWN_KEYS` that the task itself reads."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Validation figures of the model, in evaluation mode and with averaged weights if any."""
    blocks: Callable[[nn.Module], Sequence[nn.Module]] = lambda _: ()
    """The modules that can be recomputed separately."""
    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch from samples; `None`: tensors are stacked."""
    shorten: Callable[[Batch], Batch] | None = None
    """Removes the padding that all samples of a part share; `None`: samples have one shape."""
    largest: Callable[[], Batch] | None = None
    """Makes a part of one sample that takes the most memory; `None`: any sample does."""
    by_sample: bool = False
    """Whether the data set gets a `Sample` instead of an index, to augment by epoch."""
    whole: Callable[[nn.Module], Mapping[nn.Module, bool]] = lambda _: {}
    """Modules without adapters, such as a head, and whether each is trained in full."""
    notes: Sequence[str] = ()
    """Notes to the user before the training begins; each is shown once."""
    lr: float = 1e-3
    """Learning rate if the settings have none."""
    items: str = "samples"
    """Name of what `count` counts."""
    fingerprint: str = ""
    """Fingerprint of the data: a checkpoint with another one is refused. Empty: not known."""

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.named_optimizer is not None:
            raise TaskError(
                f"the task {self.name} has optimizer and named_optimizer; leave out one of them"
            )
        if unknown := self.uses - set(OWN_KEYS):
            raise TaskError(
                f"the task {self.name} uses {', '.join(sorted(unknown))}; valid: "
                f"{', '.join(OWN_KEYS)}"
            )

    def new_optimizer(self, model: nn.Module, settings: TrainSettings) -> Optimizer:
        """Make the optimiser of a model's trained parameters.

        Raises:
            TaskError: The task's function returns no optimiser, or one that cannot be used.
        """
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        parameters = [each for _, each in named]
        if self.named_optimizer is not None:
            optimizer = self.named_optimizer(named)
        elif self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            return adamw(parameters, settings, settings.lr or self.lr)
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"the optimizer of the task {self.name} gives a {type(optimizer).__name__}; give "
                "one optimizer of torch, with a group for each kind of parameter"
            )
        refuse_closure(optimizer)
        return optimizer

    def shortened(self, part: Batch) -> Batch:
        """Return a part on the host without the padding that all its samples share."""
        return part if self.shorten is None else self.shorten(part)


def find_task(settings: TrainSettings, seed: int) -> TrainTask:
    """Return the task of a preset, or the user's `package.module:name`: a `TrainTask`, or a
    function that makes one from settings.

    Raises:
        TaskError: There is no such task, its code fails, or it is no `TrainTask`.
    """
    if settings.preset in GPTS:
        return _gpt_task(settings, GPTS[settings.preset], seed)
    makers = FOLDER_PRESETS | PICTURE_PRESETS
    module_name, _, name = makers.get(settings.preset, settings.preset).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
        if settings.preset in PICTURE_PRESETS:
            found = partial(found, seed=seed)
        task = found if isinstance(found, TrainTask) else found(settings)
    except TrainingError:
        raise
    except Exception as error:
        raise NotLoadedError(
            f"train.preset {settings.preset!r} cannot be loaded on this machine: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(task, TrainTask):
        raise TaskError(
            f"train.preset {settings.preset!r} is a {type(task).__name__}; it must be a TrainTask "
            "of workers.training.tasks, or a function that takes the settings and returns one"
        )
    _refuse_unused(task, settings)
    return task


def _refuse_unused(task: TrainTask, settings: TrainSettings) -> None:
    """Raise a `TaskError` if a key is set that has no effect."""
    in_uses = ", or name it in `uses` of the TrainTask"
    remedy = "" if settings.preset in FOLDER_PRESETS | PICTURE_PRESETS else in_uses
    unused = dict.fromkeys(set(OWN_KEYS) - task.uses, remedy)
    if task.optimizer is not None or task.named_optimizer is not None:
        unused |= dict.fromkeys(("lr", "weight_decay", "optimizer"), ", or set it in its optimizer")
    if task.schedule is not None:
        unused["warmup_steps"] = ", or set it in its schedule"
    for key in sorted(unused):
        if (value := getattr(settings, key)) != TrainSettings.model_fields[key].default:
            raise TaskError(
                f"train.{key} is {value}, and the task {settings.preset!r} does not use it; leave "
                f"it out{unused[key]}"
            )


def _gpt_task(settings: TrainSettings, shape: GptShape, seed: int) -> TrainTask:
    seq = settings.seq or shape.seq
    if seq > shape.seq:
        raise TaskError(
            f"train.seq is {seq}, and {settings.preset} reads at most {shape.seq} tokens"
        )
    text: SyntheticText | TextBytes = SyntheticText(seq, shape.vocabulary, seed)
    validation_samples: Callable[[], Iterable[Tensor]] = partial(
        text.__getitems__, range(ITEMS, ITEMS + SAMPLES)
    )
    if settings.data is not None:
        text = TextBytes(settings.data, seq, settings.documents)
        validation_samples = text.validation_samples
    task = TrainTask(
        name=settings.preset,
        model=partial(Gpt, shape, settings.dropout),
        dataset=text,
        fingerprint=text.fingerprint,
        loss=partial(
            next_token_loss, label_smoothing=settings.label_smoothing, r_drop=settings.r_drop
        ),
        count=next_tokens,
        blocks=blocks_of,
        evaluate=Validation(
            samples=validation_samples, loss=next_token_loss, count=next_tokens, collate=padded
        ),
        lr={"gpt2-small": 6e-4, "gpt2-medium": 3e-4, "gpt-1b": 2e-4}.get(settings.preset, 2e-3),
        items="tokens",
    )
    if settings.packing:
        row = [torch.zeros(seq + 1, dtype=torch.int64)]
        return replace(
            task,
            # A memory plan has no text.
            dataset=PackedRows(text, seq) if isinstance(text, TextBytes) else text,
            loss=partial(packed_loss, label_smoothing=settings.label_smoothing),
            count=packed_tokens,
            largest=lambda: packed_row(row, seq)[None],
        )
    if not settings.unequal:
        return task
    return replace(
        task,
        collate=padded,
        shorten=shortened,
        largest=lambda: torch.zeros((1, seq + 1), dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A `TrainTask.evaluate` that returns `validation_loss`: the mean loss of all items of samples.

    The loss excludes what only a training adds (smoothing, dropout), so that trainings with
    different losses can be compared by it.
    """

    samples: Callable[[], Iterable[Any]]
    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    collate: Callable[[list[Any]], Batch]

    def __call__(self, model: nn.Module, rows: int = 1) -> Mapping[str, float]:
        """Return the figures. Computes at most `rows` samples at once: with as many as in a part of
        the training it never takes more memory than the training.
        """
        total, items = 0.0, 0
        for part in self.parts(model, rows):
            loss = self.loss(model, part)
            wait_asleep(loss.device)
            total += float(loss)
            items += self.count(part)
        return {"validation_loss": total / items} if items else {}

    def parts(self, model: nn.Module, rows: int) -> Iterator[Batch]:
        """Yield the samples as batches of at most `rows`, on the device of the model."""
        device, samples = next(model.parameters()).device, iter(self.samples())
        while some := list(islice(samples, rows)):
            yield on_device(self.collate(some), device)


def next_token_loss(
    model: nn.Module, tokens: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0
) -> Tensor:
    """Sum the cross-entropy of all tokens except the first of each sample and padding.

    With `r_drop` each sample is computed twice, each time with different dropout. The loss is then
    the mean of both, plus `r_drop` times half the sum of the two Kullback-Leibler divergences
    between their predictions (R-Drop, Liang et al., 2021).
    """
    passes = 2 if r_drop else 1
    inputs, labels = (
        part.repeat_interleave(passes, dim=0) for part in (tokens[:, :-1], tokens[:, 1:])
    )
    # Padding comes last, so no other token attends to it.
    logits = model(inputs.clamp(min=0)).float()
    loss = cross_entropy(logits, labels, label_smoothing)
    if not r_drop:
        return loss
    one, other = (
        functional.log_softmax(logits, dim=-1).view(len(tokens), 2, *logits.shape[1:]).unbind(1)
    )
    # KL(p, q) + KL(q, p) = sum of (p - q) (log p - log q)
    divergences = ((one.exp() - other.exp()) * (one - other)).sum()
    return loss / 2 + r_drop * divergences / 2


def next_tokens(tokens: Tensor) -> int:
    """Count the tokens that are predicted."""
    return int((tokens[:, 1:] != NO_TOKEN).sum())


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks of a preset's model."""
    return list(cast("Gpt", model).blocks)


class SyntheticText(Samples):
    """Synthetic text that needs no download: sequences of 128 random words of 4 tokens. The first
    two tokens of a word determine the others, so that a loss falls far.

    Each item is a function of seed and index. So every machine and every loader process makes the
    same items, and nothing is stored.
    """

    fingerprint = ""

    def __init__(self, seq: int, vocabulary: int, seed: int, items: int = ITEMS) -> None:
        """Make the words; no text yet."""
        self._seq = seq
        self._seed = seed
        self._items = items
        letters = bits(row_keys(seed, [_DICTIONARY], torch.arange(_WORDS))[0], _LETTERS)
        self._words = letters.to(torch.int64) % vocabulary

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return seq + 1 tokens of each."""
        keys = row_keys(self._seed, [_TEXT], torch.tensor(indices))[0]
        drawn = uniform(keys, self._seq // _LETTERS + 3)
        # Squaring makes some words more frequent. The first number is the offset in the first word.
        words = (drawn[:, 1:].square() * _WORDS).to(torch.int64)
        begins = (drawn[:, :1] * _LETTERS).to(torch.int64)
        tokens = self._words[words].flatten(1)
        return list(tokens.gather(1, begins + torch.arange(self._seq + 1)))
