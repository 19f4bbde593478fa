"""Whether a batch may be cut: the parts of its loss and gradient must add up to the whole.

A few samples are computed at once and in two parts. Where these differ by more than rounding, the
cause is found and named, and so are parameters whose gradient is nothing but rounding. Cannot tell
what only other samples would show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import or_
from typing import ClassVar, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from workers import oom
from workers.settings import FailureKind
from workers.training.accumulator import Accumulator, bends_of, readers_of
from workers.training.batches import Batch, part_of, picked, rows_of
from workers.training.buffers import (
    Kept,
    Kind,
    Place,
    Snapshot,
    copied,
    is_flag,
    is_fraction,
    places_of,
    put,
    sizes_of,
    unchanged,
)
from workers.training.dispatch_modes import Deciding, Draws, Results, is_new
from workers.training.errors import TaskError
from workers.training.random_state import RandomState
from workers.training.unevenness import shuffled, telling

Cause: TypeAlias = Literal[
    "mean", "sum", "count", "batch statistics", "dropout", "rounding", "unknown"
]

#: Samples of a check: two in each part, because a batch norm refuses a single one.
ROWS: Final = 4

#: Samples that are compared besides, where so many fit: a loss that chooses among the samples, such
#: as the 16 hardest, or those of one query, may choose alike among few.
MANY_ROWS: Final = 32

#: Times the precision. The rounding of a sum of n terms grows as their root, and the longest sum of
#: a gradient has some 10^6 (tokens x samples). In half precision and TF32 sums are of fp32, and
#: only results are rounded: some 256 on the way through a model.
_LONG_SUM: Final = 1000.0
_ROUNDINGS: Final = 16.0

#: The precision of TF32, which cards take for fp32: ten bits behind the point.
_TF32: Final = 2.0**-10

#: How far a mean may lie from the line between its parts, as a share of that line.
_LEAST_TURN: Final = 0.01

#: Two numbers that are closer, as a share of them, may be one but for rounding.
_LEAST_NEAR: Final = 1e-4

#: To see rounding, the loss of the whole is scaled by this on the way, so that all is rounded
#: differently, whatever the parts are.
_OTHER_SCALE: Final = 0.7

#: Two computations of an element of a gradient agree to 1e-6 or so, unless it is zero but for
#: rounding: then they differ wholly.
_LARGEST_DIFFERENCE: Final = 0.1

#: Some elements of any gradient happen to be next to zero. A key bias that is one with query's and
#: value's is a third.
_LEAST_SHARE: Final = 0.1


class PartsError(TaskError):
    """The parts of a batch do not add up; the text says why, and what to do."""

    def __init__(self, sentence: str, cause: Cause = "unknown") -> None:
        super().__init__(sentence)
        self.cause = cause


def check_parts(  # noqa: PLR0913 - all of it differs from batch to batch
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Batch, int], Tensor],
    *,
    weight: Callable[[Batch], float] | None,
    counted: str,
    rows: int,
    accumulator: Accumulator | None,
    buffers: dict[Place, Kind],
    sees_rounding: bool = False,
) -> list[PartsError] | None:
    """Compute some samples of a batch at once and in two parts; compare.

    It takes the memory of a part of `rows` samples, or without gradients that of a forward pass
    which keeps nothing for a backward pass. It may run out of it, and changes nothing. Fewer than
    two samples tell nothing.

    Args:
        model: What `loss` computes with: its buffers, modes and dropouts are looked at.
        batch: As `loss` takes it, and as `rows_of` can count it.
        loss: From some samples, and the place of the first of them in the check, to their loss.
        weight: By what the loss of a part is multiplied before it is added: how many items a mean
            is of. `None`: the loss is added up as it is.
        counted: What tells the loss of the items of the whole batch, for the sentence.
        rows: Samples that fit. Above `ROWS` as many more are compared besides, up to 32.
        accumulator: Whose parameters get gradients; what it has added up is lost. `None`: losses
            are compared without their gradients, and what is wrong in those alone is not seen.
        buffers: Is told the buffers that a pass changes, and how.
        sees_rounding: Whether parameters are looked at one by one, which takes their gradients once
            more, on the host.

    Returns:
        What else makes the result depend on how a batch is cut, the gravest alone: `unknown`, or
        `batch statistics` and `dropout`, or `rounding`. `None`: these samples tell nothing, such as
        some without weight.

    Raises:
        PartsError: What is added up is a `mean` in place of a sum, a `sum` in place of a mean, or a
            mean by another `count`.
        TaskError: A value of the batch cannot be cut.
    """
    kind = _ByLoss if accumulator is None else _Comparison
    of = partial(kind, model, loss, weight, accumulator or Accumulator([]), sees_rounding)
    many = min(rows, rows_of(batch), MANY_ROWS)
    rows = min(many, ROWS)
    if rows < 2:
        return []
    draws = False
    norms = {
        module: _named(module, name)
        for name, module in model.named_modules()
        if normalises_over_samples(module)
    }
    by_norms = [PartsError(f"{', '.join(norms.values())} {_NORM}", "batch statistics")]
    if norms and rows < ROWS:  # which refuse to normalise over a single sample
        return by_norms
    with unchanged(model):
        comparisons = _compared(of, batch, (rows, many), buffers)
        compared = comparisons[-1]
        for module, name in compared.drifting:
            raise PartsError(f"{_named(module, name)} {_BUFFER}", "batch statistics")
        if compared.is_bent:
            return [PartsError(_BENT)]
        adds_up = compared.is_right
        if adds_up and not any(each.tells for each in comparisons):
            return None
        noise = compared.noise() if adds_up else []
        others = {module: _named(module, name) for module, name in compared.lost}
        others = {module: name for module, name in others.items() if module not in norms}
        if not adds_up:
            # Without what only training does, a sum or a mean shows itself.
            with unchanged(model), _quiet(model):
                right = compared.adds_up(is_quiet=True)
            if not right:
                # What evaluation mode does not change.
                keeps_none = any(each.running_mean is None for each in norms)
                return by_norms if keeps_none else _wrong(compared, counted, _hint(model))
            for module in (*norms, *others):
                module.eval()
            draws = not (norms or others) or not compared.adds_up()
    found = by_norms if norms and not adds_up else []
    if draws:
        found.append(PartsError(_DROPOUT + _hint(model), "dropout"))
    elif others:
        found.append(PartsError(f"{', '.join(others.values())} {_BUFFER}", "batch statistics"))
    if noise and not found:
        more = f" (and of {len(noise) - 1} other parameters)" if len(noise) > 1 else ""
        found.append(PartsError(f"{noise[0]}{more} {_ROUNDING}", "rounding"))
    return found


def normalises_over_samples(module: nn.Module) -> bool:
    """Whether it is a batch norm that takes its statistics from what is computed together now."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and (module.training or module.running_mean is None)


def _compared(
    of: Callable[[Batch], _Comparison],
    batch: Batch,
    rows: tuple[int, int],
    buffers: dict[Place, Kind],
) -> list[_Comparison]:
    """Compare few samples for each way in which they differ, and many, until some do not add up."""
    done: list[_Comparison] = []
    few, many = rows
    for places in [*telling(batch, few), *([shuffled(batch, many)] if many > few else [])]:
        if done:
            done[-1]._whole.clear()  # only the last one is looked at for rounding
        try:
            one = of(picked(batch, places))
            one.adds_up()
        except Exception as error:
            if isinstance(error, TaskError) or oom.classify(error).kind is not FailureKind.OTHER:
                raise
            oom.drop_frames(error)
            # A loss may need the order of the batch: packed sequences are sorted by their lengths.
            one = of(picked(batch, sorted(places)))
            one.adds_up()
        done.append(one)
        if not one.is_right or one.lost or one.drifting or one.is_bent:
            break
    adds_up = not any(each.lost for each in done) and all(each.is_right for each in done)
    for place in {place for each in done for place in each.kept}:
        kept = [each.kept.get(place, True) for each in done]
        means = [each.is_right and place in each.means for each in done]
        sums = [adds_up and (place in each.sums or place not in each.kept) for each in done]
        buffers[place] = (
            "once" if all(kept) else "mean" if all(map(or_, kept, means))
            else "sum" if all(sums) else "other"
        )  # fmt: skip
    return done


def _wrong(compared: _Comparison, counted: str, hint: str) -> list[PartsError]:
    """Return what is unknown, or raise what is known to be wrong."""
    cause = compared.cause()
    sentence = compared.unknown if cause == "unknown" else _SENTENCES[cause]
    sentence = sentence.replace("COUNT", counted)
    error = PartsError(sentence if cause in {"mean", "sum"} else sentence + hint, cause)
    if cause == "unknown":
        return [error]
    raise error


@dataclass
class _Comparison:
    """Some samples in two parts and at once."""

    #: What is said where neither a sum nor a mean is seen.
    unknown: ClassVar[str] = (
        "the parts of a batch do not add up to the whole, and the loss is neither the sum nor the "
        "mean of its samples; a loss that compares samples with each other cannot be cut"
    )

    _model: nn.Module
    _loss: Callable[[Batch, int], Tensor]
    _weight: Callable[[Batch], float] | None
    _sums: Accumulator
    _sees_rounding: bool
    _batch: Batch

    def __post_init__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks
        #: Shows the tensors that a gradient is computed from.
        self._looking: Callable[[], AbstractContextManager[object]] = partial(
            hooks, self._look, lambda saved: saved
        )

    def adds_up(self, *, is_quiet: bool = False) -> bool:
        """Compute; say, and keep, whether the parts add up. What is not finite tells nothing."""
        self.is_right = self._adds_up(is_quiet=is_quiet)
        if not self.is_right:
            self.lost += [place for place in self.means if place[1] in place[0]._buffers]
        return self.is_right

    def _adds_up(self, *, is_quiet: bool) -> bool:
        rows = rows_of(self._batch)
        half, start = rows // 2, Snapshot(places_of(self._model.modules(), small=True))
        self._precision = 0.0
        #: Loss, and gradient along the weights, of the whole and of both parts.
        self._points: list[tuple[float, float]] = []
        #: Tables of which each pass shortens the rows that it reads, which is done once for all.
        self._shortened = _shortened(self._model)
        self._is_whole_table_read = False
        self._bends: list[dict[object, set[object]]] = []
        self._numbers: list[list[float]] = []
        self._sums.begin(2 * rows, 1)
        random = RandomState(torch.device("cpu"))
        scale = _OTHER_SCALE if self._sees_rounding else 1.0
        try:
            with Draws(constant=False) as of_whole:
                whole, _ = self._add(self._batch, 0, scale, is_whole=True)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self._looking = partial(Results, self._look)  # torch.func allows no such hooks
            start.restore()
            random.restore()
            with Draws(constant=False) as of_whole:
                whole, _ = self._add(self._batch, 0, scale, is_whole=True)
        #: The gradient of the whole, negative, where single parameters are looked at.
        self._whole = [
            (parameter, own.to("cpu", copy=True))
            for parameter, own in (self._sums.pairs if self._sees_rounding else ())
        ]
        after, sizes = start.changed(restore=True), sizes_of(self._model, start)
        random.restore()
        with Draws(constant=False) as of_part:
            first, length = self._add(part_of(self._batch, 0, half), 0)
        one = start.changed(restore=True)
        second, other = self._add(part_of(self._batch, half, rows - half), half)
        two = start.changed(restore=True)
        #: Other numbers of the model that a pass changes, and each further one.
        self.drifting = [
            place
            for place, size in sizes_of(self._model, start).items()
            if size != sizes.get(place)
            and not (math.isnan(size) and math.isnan(sizes[place]))
            and place[0] not in self._shortened
        ]
        if self._is_whole_table_read:  # also rows that another part shortens
            self.drifting += [(module, "weight") for module in self._shortened]
        numbers = self._compare_buffers(start, after, (one, two), half, rows)
        self.tells = bool(length and other)
        #: Whether what was reduced over the samples is bent, which shows on one side alone.
        whole_bends, *bends = self._bends
        self.is_bent = any(
            all(each.get(of, set()) - known for each in bends) for of, known in whole_bends.items()
        )
        fine = self._precision < _TF32 / 2
        self._tolerance = self._precision * (_LONG_SUM if fine else _ROUNDINGS)
        self.lost += [each for each in numbers if self._reads(each, after[each], start, half)]
        if not math.isfinite(whole) or not math.isfinite(first + second):
            return not math.isfinite(whole)
        # What is drawn for each sample may be rare, and change nothing here.
        draws_alike = is_quiet or of_whole.shapes == of_part.shapes
        is_right = (
            draws_alike
            and abs(first + second - whole) <= self._tolerance * (abs(first) + abs(second))
            and _norm([own for _, own in self._sums.pairs]) <= self._tolerance * (length + other)
        )  # fmt: skip
        self.is_bent = self.is_bent or (is_right and self._decides(start, random))
        return is_right

    def _compare_buffers(
        self,
        start: Snapshot,
        after: dict[Place, Kept],
        of_parts: tuple[dict[Place, Kept], dict[Place, Kept]],
        half: int,
        rows: int,
    ) -> list[Place]:
        """Compare what the whole has made of buffers with what each part has, the first of `half`
        of the rows. Return the numbers that parts make something else of.
        """
        #: Buffers that a pass changes: whether it does so once, whatever its samples are.
        self.kept: dict[Place, bool] = {}
        #: Those of which the whole has the mean of the parts, as of a loss that is kept.
        self.means: list[Place] = []
        #: Those to which each part adds its own.
        self.sums: list[Place] = []
        #: Buffers to which the parts add up to something else than the whole.
        self.lost: list[Place] = []
        numbers: list[Place] = []
        for place, at in after.items():
            before = start.saved[place]
            parts = [each.get(place, before) for each in of_parts]
            self.kept[place] = all(_alike(part, at, before) for part in parts)
            added = before if is_flag(before) else parts[0] + parts[1] - before
            if self.kept[place]:
                continue
            if _alike(added, at, before):
                self.sums += [] if is_flag(before) else [place]
            else:
                mean = (half * parts[0] + (rows - half) * parts[1]) / rows
                is_mean = is_fraction(at) and _alike(mean, at, before)
                is_buffer = place[1] in place[0]._buffers
                (self.means if is_mean else self.lost if is_buffer else numbers).append(place)
        return numbers

    def _decides(self, start: Snapshot, random: RandomState) -> bool:
        """Whether the loss of the whole is another one where a number that no part has, such as its
        mean, is smaller or larger: then some parts may decide otherwise than the whole.
        """
        whole, *parts = self._numbers
        others = sorted(number for each in parts for number in each)
        close = max(_LEAST_NEAR, self._tolerance)
        if not any(is_new(number, others, close) for number in whole):
            return False
        losses = []
        for way in (0, -1, 1):
            random.restore()
            try:
                with (
                    torch.set_grad_enabled(bool(self._sums.parameters)),
                    Deciding(others, close, way, rows_of(self._batch)),
                ):
                    loss = self._loss(self._batch, 0)
                losses.append(float(loss.detach()))
                del loss  # the next pass is to have the memory of its activations
            except Exception as error:
                if oom.classify(error).kind is not FailureKind.OTHER:
                    raise
                oom.drop_frames(error)  # a loss may refuse what it computes, such as by `assert`
            start.restore()
        at, near = self._points[0][0], self._tolerance * abs(self._points[0][0])
        return bool(losses) and abs(losses[0] - at) <= near < max(abs(at - each) for each in losses)

    def _reads(self, place: Place, after: Kept, start: Snapshot, rows: int) -> bool:
        """Whether the loss of the first rows reads a number that a pass has changed. Nothing reads
        one in which a module keeps its last loss.
        """
        losses = []
        for number in (start.saved[place], after):
            put(place, copied(number))
            with torch.set_grad_enabled(bool(self._sums.parameters)):
                losses.append(float(self._loss(part_of(self._batch, 0, rows), 0).detach()))
            start.restore()
        return abs(losses[1] - losses[0]) > self._tolerance * abs(losses[0])

    def _add(
        self, part: Batch, first: int, scale: float = 1.0, *, is_whole: bool = False
    ) -> tuple[float, float]:
        """Add a part to the sums, or subtract the whole; return its loss and length.

        What goes back through the model has the sign that it has in a step: hooks may depend on it.
        """
        weight = 1.0 if self._weight is None else float(self._weight(part))
        if not weight:  # of no items, which add nothing
            self._points.append((0.0, 0.0))
            self._bends.append({})
            self._numbers.append([])
            return 0.0, 0.0
        along, norms = list[Tensor](), list[Tensor]()

        def seen(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
            new = gradient if scale == 1 else gradient / scale
            along.append(torch.dot(parameter.detach().flatten(), new.flatten()).real.double())
            norms.append(torch.linalg.vector_norm(new).double())
            return new.neg() if is_whole else new

        with self._looking():
            with Deciding() as deciding:
                loss = self._loss(part, first)
            self._numbers.append(deciding.numbers)
            self._bends.append(bends_of(loss))
            readers = readers_of(loss, self._shortened.values()) if self._shortened else set[str]()
            self._is_whole_table_read |= not all(each.startswith("Embedding") for each in readers)
            self._sums.add(rows_of(part), loss, weight * scale, seen)
        value = float(self._look(loss.detach()))
        self._points.append((value, float(sum(along)) / weight))
        return value * weight, float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def noise(self) -> list[str]:
        """Return, after `adds_up`, the parameters whose gradient is nothing but rounding, with the
        share of it that is.
        """
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        left, found = dict(self._sums.pairs), []
        for parameter, whole in self._whole:
            rest = left[parameter].cpu()  # of the parts without the whole
            largest = torch.maximum(whole.abs(), (rest - whole).abs())
            noise = rest.abs() > _LARGEST_DIFFERENCE * largest
            share = int(noise.sum()) / max(1, int((largest > 0).sum()))
            if share > _LEAST_SHARE and parameter in names:
                found.append(f"{share:.0%} of the gradient of {names[parameter]}")
        return found

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
        (whole, _), (first, _), (second, _) = self._points
        mean: Cause = "mean" if self._weight is None else "count"
        if not math.isfinite(first + second):  # the mean of no items is NaN
            return mean
        if self._weight is not None and abs(first + second - whole) <= self._tolerance * abs(whole):
            return "sum"
        # A mean lies between its parts, by one share in the loss and in the gradient.
        points = torch.tensor(self._points, dtype=torch.float64)
        at, one, other = points / points.abs().amax(0).clamp(min=1e-300)
        way = one - other
        share = ((at - other) @ way / (way @ way).clamp(min=1e-300)).clamp(0, 1)
        off = torch.linalg.vector_norm(at - other - share * way)
        near = self._tolerance + _LEAST_TURN * torch.linalg.vector_norm(way)
        return mean if bool(off <= near) else "unknown"


@dataclass
class _ByLoss(_Comparison):
    """The losses of some samples in two parts and at once."""

    unknown: ClassVar[str] = (
        "the losses of the parts of a batch do not add up to that of the whole; where it is a mean "
        "over items of which samples have unequally many (padding, ignored labels, class weights), "
        "return the sum over the items (reduction='sum') and hand over their number in the whole "
        "batch (COUNT); a loss that compares samples with each other cannot be cut"
    )

    def _add(
        self,
        part: Batch,
        first: int,
        scale: float = 1.0,  # noqa: ARG002 - a loss has none
        *,
        is_whole: bool = False,  # noqa: ARG002 - nor a sign
    ) -> tuple[float, float]:
        """Compute the loss of a part; return it, and any length of a gradient that counts."""
        weight = 1.0 if self._weight is None else float(self._weight(part))
        value, deciding = 0.0, Deciding()
        if weight:
            with torch.no_grad(), Results(self._look), deciding:
                value = float(self._loss(part, first))
        self._numbers.append(deciding.numbers)
        self._points.append((value, value))
        self._bends.append({})
        return value * weight, float(bool(weight))

    def cause(self) -> Cause:
        """Return what the losses look like: a sum in place of a mean, or the other way round."""
        whole, first, second = (value for value, _ in self._points)
        summed, shown = first + second, self._weight is not None
        near = self._tolerance * abs(whole)
        if abs((summed if shown else summed / 2) - whole) <= near:
            return "sum" if shown else "mean"
        return "unknown"


def _shortened(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Return the embeddings with a `max_norm`, each with its table."""
    kinds = nn.Embedding, nn.EmbeddingBag
    found = [each for each in model.modules() if isinstance(each, kinds)]
    return {each: each.weight for each in found if each.max_norm is not None}


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, and what draws random numbers draw constants."""
    rests = [(each, each.dropout) for each in model.modules() if isinstance(each, nn.RNNBase)]
    model.eval()
    for rnn, _ in rests:  # cuDNN has no gradient of one in eval
        rnn.train().dropout = 0.0
    try:
        with Draws(constant=True):
            yield
    finally:
        for rnn, dropout in rests:
            rnn.dropout = dropout


def _alike(one: Kept, other: Kept, before: Kept) -> bool:
    """Whether two successors of a buffer or number are equal but for rounding."""
    one, other, before = (torch.as_tensor(each) for each in (one, other, before))
    if one.shape != other.shape or not other.is_floating_point():
        return torch.equal(one, other)
    precision = torch.finfo(other.dtype).eps
    rounding = max(1e-6, precision * (_LONG_SUM if precision < _TF32 / 2 else _ROUNDINGS))
    largest = max(float(each.abs().max()) if each.numel() else 0.0 for each in (other, before))
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _named(module: nn.Module, name: str) -> str:
    return f"{name} ({type(module).__name__})"


def _hint(model: nn.Module) -> str:
    """Return what else may be wrong where parts do not add up: time before samples."""
    first = (
        _named(module, name)
        for name, module in model.named_modules()
        if getattr(module, "batch_first", True) is False
    )
    return next((f"; {each} {_TIME_FIRST}" for each in first), "")


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the length of all tensors as one vector."""
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))] if tensors else []
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


_NORM: Final = (
    "normalises over the samples that are computed together, so the result depends on how a batch "
    "is cut (batch statistics); use GroupNorm or LayerNorm, or put it into eval mode"
)
_BENT: Final = (
    "the loss bends what was added up or averaged over samples (abs, clamp, relu or maximum of "
    "it, or an `if`), so the parts of a batch may be on another side of the bend than the whole; "
    "bend what each sample gives, before it is averaged"
)
_BUFFER: Final = (
    "is changed by each pass in a way that depends on how a batch is cut (batch statistics); "
    "change it after the step, or put the module into eval mode"
)
_DROPOUT: Final = (
    "the model draws from torch's own random numbers, or those of Python or NumPy for each sample, "
    "so the result depends on how a batch is cut (dropout); use nn.Dropout modules in place of "
    "functional.dropout, which become keyed by sample where they are in the model that was handed "
    "over (of several models an nn.ModuleList), draw noise before the step and put it into the "
    "batch, and set dropout inside an attention to 0 (in the config of a transformers model: "
    "attention_dropout, attn_pdrop or attention_probs_dropout_prob)"
)
_ROUNDING: Final = (
    "is nothing but rounding, which Adam scales up to full steps, so the result depends on the "
    "micro-batch; a bias of the keys of an attention is such a parameter: leave it out (bias=False)"
)
_TIME_FIRST: Final = (
    "has batch_first=False: if the first dimension of the batch is time, hand over batches whose "
    "first dimension is the samples, and turn them in the model after its dropout"
)
_SENTENCES: Final[dict[Cause, str]] = {
    "mean": "the loss of a part is a mean, and is added up as a sum: it ignores COUNT; return the "
    "sum over the items (reduction='sum'), or that divided by the items of the whole batch if the "
    "loss gets their number",
    "sum": "the loss of a part is a sum over its items, and is taken for a mean; hand over their "
    "number in the whole batch (COUNT), or return the mean of the samples",
    "count": "the loss of a part is a mean over items of which samples have unequally many "
    "(padding, ignored labels, class weights), so parts weigh wrongly; return the sum over the "
    "items (reduction='sum') and hand over their number, or the sum of their weights, in the whole "
    "batch (COUNT)",
}
