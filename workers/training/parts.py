"""Whether a batch may be cut: the parts of its loss and gradient must add up to the whole.

A few samples are computed at once and in two parts. Where these differ by more than rounding, the
cause is found and named. Does not look at single parameters (`trainer.hazards` does), and cannot
tell what only other samples would show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from workers.training.accumulator import Accumulator
from workers.training.batches import Batch, part_of, picked, rows_of, tensors_in
from workers.training.errors import TaskError

Cause: TypeAlias = Literal["mean", "sum", "count", "batch statistics", "dropout", "unknown"]

#: Samples of a check: two in each part, because a batch norm refuses a single one.
ROWS: Final = 4

#: Times the precision. The rounding of a sum of n terms grows as their root, and the longest sum of
#: a gradient has some 10^6 (tokens x samples). In half precision and TF32 sums are of fp32, and
#: only results are rounded: some 256 on the way through a model.
_LONG_SUM: Final = 1000.0
_ROUNDINGS: Final = 16.0

#: The precision of TF32, which cards take for fp32: ten bits behind the point.
_TF32: Final = 2.0**-10

#: How far a mean may lie from the line between its parts, as a share of that line.
_LEAST_TURN: Final = 0.01


class PartsError(TaskError):
    """The parts of a batch do not add up; the text says why, and what to do."""

    def __init__(self, sentence: str, cause: Cause = "unknown") -> None:
        super().__init__(sentence)
        self.cause = cause


def check_parts(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Batch, int], Tensor],
    *,
    weight: Callable[[Batch], float] | None = None,
    counted: str = "count",
    rows: int = ROWS,
    accumulator: Accumulator | None = None,
) -> list[PartsError]:
    """Compute up to `rows` samples of a batch at once and in two parts; compare.

    It takes the memory of a part of `rows` samples, may run out of it as one, and changes nothing.
    Fewer than two samples tell nothing.

    Args:
        model: Its trained parameters get the gradients.
        batch: As `loss` takes it, and as `rows_of` can count it.
        loss: From some samples, and the place of the first of them in the check, to their loss.
        weight: By what the loss of a part is multiplied before it is added: how many items a mean
            is of. `None`: the loss is added up as it is.
        counted: What tells the loss of the items of the whole batch, for the sentence.
        rows: Samples that fit.
        accumulator: What it has added up is lost; `None`: more memory is taken for one.

    Returns:
        What else makes the result depend on how a batch is cut: `dropout`, `batch statistics`, or
        `unknown`.

    Raises:
        PartsError: What is added up is a `mean` in place of a sum, a `sum` in place of a mean, or a
            mean by another `count`.
        TaskError: A value of the batch cannot be cut.
    """
    rows = min(rows, rows_of(batch), ROWS)
    if rows < 2:
        return []
    order = _by_items(batch)[0]
    some = picked(batch, [*order[: rows // 2], *order[rows // 2 - rows :]])
    trained = [each for each in model.parameters() if each.requires_grad]
    compared = _Comparison(trained, loss, weight, accumulator or Accumulator(trained), some)
    with unchanged(model):
        if compared.adds_up():
            return []
        drew = compared.drew
        norms = [
            f"{name or 'the model'} ({type(module).__name__})"
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        ]
        # Without what only training does, a sum or a mean shows itself.
        for module in model.modules():
            module.training = isinstance(module, nn.RNNBase)  # cuDNN has no gradient of one in eval
        right = compared.adds_up()
    if not right and not compared.drew and (cause := compared.cause()) != "unknown":
        raise PartsError(_SENTENCES[cause].replace("COUNT", counted), cause)
    found = [PartsError(f"{', '.join(norms)} {_NORM}", "batch statistics")] if norms else []
    if drew or compared.drew:
        found.append(PartsError(_DROPOUT, "dropout"))
    return found or [PartsError(_UNKNOWN)]


class PartsCheck:
    """Says which batches are to be checked, and remembers what was found."""

    def __init__(self) -> None:
        self._seen: set[object] = set()
        self._uneven = False
        self._told: set[str] = set()

    def due(self, batch: Batch) -> bool:
        """Whether no batch of this form was checked: types, sizes to a factor of two, and whether
        samples are filled up unequally.
        """
        self._uneven = self._uneven or _by_items(batch)[1]
        forms = ((each.dtype, *map(int.bit_length, each.shape[1:])) for each in tensors_in(batch))
        self._form = (self._uneven, *forms)
        return rows_of(batch) > 1 and self._form not in self._seen

    def done(self, found: Iterable[str]) -> list[str]:
        """Take note of a check and its sentences; return those that are new."""
        self._seen.add(self._form)
        new = [sentence for sentence in found if sentence not in self._told]
        self._told.update(new)
        return new


@dataclass
class _Comparison:
    """Some samples in two parts and at once."""

    _parameters: Sequence[nn.Parameter]
    _loss: Callable[[Batch, int], Tensor]
    _weight: Callable[[Batch], float] | None
    _sums: Accumulator
    _batch: Batch

    def adds_up(self) -> bool:
        """Compute; say whether the parts add up. What is not finite tells nothing."""
        device = self._parameters[0].device
        before, rows = _random_states(device), rows_of(self._batch)
        self._precision = 0.0
        #: Loss, and gradient along the weights, of both parts and of the whole.
        self._points: list[tuple[float, float]] = []
        self._sums.begin(rows, 1)
        half = rows // 2
        first, length = self._add(part_of(self._batch, 0, half), 0, half)
        second, other = self._add(part_of(self._batch, half, rows - half), half, rows - half)
        whole, _ = self._add(self._batch, 0, 0)
        self.drew = not all(map(torch.equal, before, _random_states(device)))
        fine = self._precision < _TF32 / 2
        self._tolerance = self._precision * (_LONG_SUM if fine else _ROUNDINGS)
        if not math.isfinite(whole) or not math.isfinite(first + second):
            return not math.isfinite(whole)
        return (
            abs(first + second - whole) <= self._tolerance * (abs(first) + abs(second))
            and _norm(self._sums.gradients) <= self._tolerance * (length + other)
        )  # fmt: skip

    def _add(self, part: Batch, first: int, rows: int) -> tuple[float, float]:
        """Add a part to the sums, or subtract the whole (0 rows); return its loss and length."""
        weight = 1.0 if self._weight is None else float(self._weight(part))
        if not weight:  # of no items, which add nothing
            self._points.append((0.0, 0.0))
            return 0.0, 0.0
        with torch.autograd.graph.saved_tensors_hooks(self._look, lambda saved: saved):
            loss = self._loss(part, first)
            found = self._sums.gradients_of(loss, weight if rows else -weight)
        value = float(self._look(loss.detach()))
        self._sums.add(rows, loss.detach(), found)
        pairs = [
            (own.detach().flatten(), new.flatten())
            for own, new in zip(self._parameters, found, strict=True)
            if new is not None
        ]
        along = float(sum(torch.dot(own, new).double() for own, new in pairs))
        self._points.append((value, along / (weight if rows else -weight)))
        return value * weight, _norm([new for _, new in pairs])

    def _look(self, saved: Tensor) -> Tensor:
        """Take note of the precision that a gradient is computed in."""
        if saved.is_floating_point():
            precision = torch.finfo(saved.dtype).eps
            if saved.is_cuda and saved.dtype == torch.float32:
                precision = _TF32
            self._precision = max(self._precision, precision)
        return saved

    def cause(self) -> Cause:
        """Return what losses and gradients look like that did not add up."""
        (first, _), (second, _), (whole, _) = self._points
        mean: Cause = "mean" if self._weight is None else "count"
        if not math.isfinite(first + second):  # the mean of no items is NaN
            return mean
        if self._weight is not None and abs(first + second - whole) <= self._tolerance * abs(whole):
            return "sum"
        # A mean lies between its parts, by one share in the loss and in the gradient.
        points = torch.tensor(self._points, dtype=torch.float64)
        one, other, at = points / points.abs().amax(0).clamp(min=1e-300)
        way = one - other
        share = ((at - other) @ way / (way @ way).clamp(min=1e-300)).clamp(0, 1)
        off = torch.linalg.vector_norm(at - other - share * way)
        near = self._tolerance + _LEAST_TURN * torch.linalg.vector_norm(way)
        return mean if bool(off <= near) else "unknown"


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Leave buffers, modes and torch's random numbers as they were."""
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    random, *of_card = _random_states(device)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer.copy_(saved)
        torch.set_rng_state(random)
        for state in of_card:
            torch.cuda.set_rng_state(state, device)


def _random_states(device: torch.device) -> list[Tensor]:
    of_card = device.type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if of_card else [])]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the length of all tensors as one vector."""
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))] if tensors else []
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@torch.no_grad()
def _by_items(batch: Batch) -> tuple[list[int], bool]:
    """Return the places of samples by what fills them up, the least first; and whether they differ.

    That is a run of one number at the begin or end of a sample, and ignored labels (negative).
    """
    rows = rows_of(batch)
    filled = torch.zeros(rows, dtype=torch.int64)
    for tensor in tensors_in(batch):
        real = tensor.is_floating_point() or tensor.is_complex()
        if not real and tensor.dim() == 2 and tensor.shape[0] == rows and tensor.shape[1]:
            begin, end = tensor == tensor[:, :1], tensor.flip(1) == tensor[:, -1:]
            runs = begin.int().cumprod(1) + end.int().cumprod(1) + 2 * (tensor < 0)
            filled += runs.sum(1).cpu()
    # By chance a sample of tokens begins or ends with two that are equal.
    return filled.argsort().tolist(), bool(filled.max() - filled.min() > 1)


_NORM: Final = (
    "normalises over the samples that are computed together, so the result depends on how a batch "
    "is cut (batch statistics); use GroupNorm or LayerNorm, or put it into eval mode"
)
_DROPOUT: Final = (
    "the model draws from torch's own random numbers, so the result depends on how a batch is cut "
    "(dropout); use nn.Dropout modules in place of functional.dropout, which become keyed by "
    "sample, and set dropout inside an attention to 0 (in the config of a transformers model: "
    "attention_dropout, attn_pdrop or attention_probs_dropout_prob)"
)
_UNKNOWN: Final = (
    "the parts of a batch do not add up to the whole, and the loss is neither the sum nor the mean "
    "of its samples; a loss that compares samples with each other cannot be cut"
)
_SENTENCES: Final[dict[Cause, str]] = {
    "mean": "the loss of a part is a mean, and is added up as a sum: it ignores COUNT; return the "
    "sum over the items (reduction='sum'), or that divided by the items of the whole batch if the "
    "loss gets their number",
    "sum": "the loss of a part is a sum over its items, and is taken for a mean; hand over their "
    "number in the whole batch (COUNT), or return the mean of the samples",
    "count": "the loss of a part is a mean over items of which samples have unequally many "
    "(padding, ignored labels), so parts weigh wrongly; return the sum over the items "
    "(reduction='sum') and hand over their number in the whole batch (COUNT)",
}
