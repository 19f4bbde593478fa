"""What is trained: a `TrainTask` of model, data set, loss, and optionally optimiser and evaluation.

The presets are tasks, and so is what a user writes; `train.preset` names either. A task knows
neither the size of a batch nor how it is split.
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
    filled_up,
    packed_loss,
    packed_row,
    packed_tokens,
    shortened,
)
from workers.training.settings import FOLDER_PRESETS, PICTURE_PRESETS, TrainSettings
from workers.training.text import SAMPLES, TextBytes

#: Keys of `train:` that only a task can obey: what is trained on, and its loss.
OWN_KEYS: Final = (
    "data", "documents", "seq", "packing", "dropout", "label_smoothing", "r_drop",
)  # fmt: skip

#: Items of made text, unless told otherwise.
ITEMS: Final = 65_536

#: The words of made text, and the letters of each, which are its tokens.
_WORDS, _LETTERS = 128, 4
#: The streams of random numbers.
_DICTIONARY, _TEXT = range(2)


class Items(Protocol):
    """A data set whose items can be had by their index, as torch's map-style ones."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...  # noqa: ANN401 - an index, or a `Sample`


def trained_parameters(task: TrainTask, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a task's model that are trained.

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
    """What is trained."""

    name: str
    """Checkpoints of a task with another name are refused."""
    model: Callable[[], nn.Module]
    """Makes the model on the CPU. torch's random numbers are seeded around the call."""
    dataset: Items
    loss: Callable[[nn.Module, Batch], Tensor]
    """The sum (or the mean, see `loss_is`) of the losses of all items in a part of a batch."""
    loss_is: Literal["sum", "mean"] = "sum"
    """A mean is multiplied by `count` of the part. What it is not said to be is refused."""
    count: Callable[[Batch], int] = rows_of
    """The items (samples, tokens) in a batch or part, by which the sum of its loss is divided."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """`None`: AdamW, as the settings say."""
    named_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer] | None = None
    """The same from pairs of name and parameter."""
    schedule: Callable[[int], float] | None = None
    """From the step, counted from 0, to a factor of the learning rates; `None`: as settings say."""
    uses: frozenset[str] = frozenset()
    """Of `OWN_KEYS`, those that the task itself reads."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Figures of merit, of the model in evaluation mode, with averaged weights if there are."""
    blocks: Callable[[nn.Module], Sequence[nn.Module]] = lambda _: ()
    """The modules that can be recomputed one by one."""
    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch of samples; `None`: tensors are stacked."""
    shorten: Callable[[Batch], Batch] | None = None
    """Takes off what fills up all samples of a part; `None`: all samples have one shape."""
    largest: Callable[[], Batch] | None = None
    """Makes a part of the one sample that takes the most memory; `None`: any one does."""
    by_sample: bool = False
    """Whether the data set is asked by `Sample` and not by index, to augment by epoch."""
    whole: Callable[[nn.Module], Mapping[nn.Module, bool]] = lambda _: {}
    """Modules that adapters leave as they are, such as a head; and whether they are trained."""
    notes: Sequence[str] = ()
    """What the user should know before it begins; each is told once."""
    lr: float = 1e-3
    """Where the settings name none."""
    items: str = "samples"
    """What `count` counts."""
    fingerprint: str = ""
    """Of the data: checkpoints of a training on other data are refused. Empty: not known."""

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
            TaskError: The task gives none, or one that cannot be used.
        """
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        parameters = [each for _, each in named]
        if self.named_optimizer is not None:
            made = self.named_optimizer(named)
        elif self.optimizer is not None:
            made = self.optimizer(parameters)
        else:
            return adamw(parameters, settings, settings.lr or self.lr)
        if not isinstance(made, Optimizer):
            raise TaskError(
                f"the optimizer of the task {self.name} gives a {type(made).__name__}; give one "
                "optimizer of torch, with a group for each kind of parameter"
            )
        refuse_closure(made)
        return made

    def shortened(self, part: Batch) -> Batch:
        """Return a part on the host without what fills up all of its samples."""
        return part if self.shorten is None else self.shorten(part)


def find_task(settings: TrainSettings, seed: int) -> TrainTask:
    """Return the preset, or the user's `package.module:name`: a `TrainTask`, or a function that
    makes one of settings.

    Raises:
        TaskError: There is no such task, it fails, or it is none.
    """
    if settings.preset in GPTS:
        return _gpt_task(settings, GPTS[settings.preset], seed)
    makers = FOLDER_PRESETS | PICTURE_PRESETS
    module_name, _, name = makers.get(settings.preset, settings.preset).partition(":")
    try:
        own = getattr(importlib.import_module(module_name), name)
        if settings.preset in PICTURE_PRESETS:
            own = partial(own, seed=seed)
        task = own if isinstance(own, TrainTask) else own(settings)
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
    """Raise a `TaskError` if a key is set that would change nothing."""
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
    text: MadeText | TextBytes = MadeText(seq, shape.vocabulary, seed)
    unseen: Callable[[], Iterable[Tensor]] = partial(
        text.__getitems__, range(ITEMS, ITEMS + SAMPLES)
    )
    if settings.data is not None:
        text = TextBytes(settings.data, seq, settings.documents)
        unseen = text.unseen
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
            samples=unseen, loss=next_token_loss, count=next_tokens, collate=filled_up
        ),
        lr={"gpt2-small": 6e-4, "gpt2-medium": 3e-4, "gpt-1b": 2e-4}.get(settings.preset, 2e-3),
        items="tokens",
    )
    if settings.packing:
        row = [torch.zeros(seq + 1, dtype=torch.int64)]
        return replace(
            task,
            # A plan of memory has no text.
            dataset=PackedRows(text, seq) if isinstance(text, TextBytes) else text,
            loss=partial(packed_loss, label_smoothing=settings.label_smoothing),
            count=packed_tokens,
            largest=lambda: packed_row(row, seq)[None],
        )
    if not settings.unequal:
        return task
    return replace(
        task,
        collate=filled_up,
        shorten=shortened,
        largest=lambda: torch.zeros((1, seq + 1), dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A `TrainTask.evaluate` that gives the mean loss of all items of samples, as
    `validation_loss`.

    Its loss is without what only a training adds to it (smoothing, dropout), so that trainings
    whose losses mean different things are compared by it.
    """

    samples: Callable[[], Iterable[Any]]
    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int]
    collate: Callable[[list[Any]], Batch]

    def __call__(self, model: nn.Module, rows: int = 1) -> Mapping[str, float]:
        """Return the figures. At most `rows` samples are computed at once: with as many as a part
        of the training has, that never takes more memory than the training itself.
        """
        total, items = 0.0, 0
        for part in self.parts(model, rows):
            loss = self.loss(model, part)
            wait_asleep(loss.device)
            total += float(loss)
            items += self.count(part)
        return {"validation_loss": total / items} if items else {}

    def parts(self, model: nn.Module, rows: int) -> Iterator[Batch]:
        """Yield the samples as batches of at most so many, on the device of the model."""
        device, samples = next(model.parameters()).device, iter(self.samples())
        while some := list(islice(samples, rows)):
            yield on_device(self.collate(some), device)


def next_token_loss(
    model: nn.Module, tokens: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0
) -> Tensor:
    """Sum the cross-entropy of all tokens but the first of each sample, and those that fill up.

    With `r_drop` each sample is computed twice, each time with its own dropout: the loss is the
    mean of both, plus `r_drop` times half the two divergences (Kullback-Leibler) of their
    predictions (R-Drop, Liang et al., 2021).
    """
    passes = 2 if r_drop else 1
    inputs, labels = (
        part.repeat_interleave(passes, dim=0) for part in (tokens[:, :-1], tokens[:, 1:])
    )
    # What fills up comes last, so no other token sees it.
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


class MadeText(Samples):
    """Text that needs no download: sentences of 128 made words of 4 tokens, of which two tell the
    next, so that a loss falls far.

    Each item is a function of seed and index. So every machine and every loader process makes the
    same ones, and nothing is stored.
    """

    fingerprint = ""

    def __init__(self, seq: int, vocabulary: int, seed: int, items: int = ITEMS) -> None:
        """Make no text yet."""
        self._seq = seq
        self._seed = seed
        self._items = items
        letters = bits(row_keys(seed, [_DICTIONARY], torch.arange(_WORDS))[0], _LETTERS)
        self._words = letters.to(torch.int64) % vocabulary

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return seq + 1 tokens of each."""
        keys = row_keys(self._seed, [_TEXT], torch.tensor(indices))[0]
        drawn = uniform(keys, self._seq // _LETTERS + 3)
        # The square makes words unequally frequent; the first number says where in a word the text
        # begins.
        words = (drawn[:, 1:].square() * _WORDS).to(torch.int64)
        begins = (drawn[:, :1] * _LETTERS).to(torch.int64)
        tokens = self._words[words].flatten(1)
        return list(tokens.gather(1, begins + torch.arange(self._seq + 1)))
