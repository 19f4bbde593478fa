"""Checks whether a batch may be cut: the parts of its loss and gradient must add up to the whole.

A check computes a few samples at once and in two parts. If both differ by more than rounding, it
names the cause. It also names parameters whose gradient is only rounding. Cannot find what only
other samples would show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import or_
from typing import ClassVar, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from workers import oom
from workers.settings import FailureKind
from workers.training.accumulator import Accumulator, kinks_of, readers_of
from workers.training.batches import Batch, part_of, rows_of, samples_at
from workers.training.buffers import (
    BufferChange,
    BufferValue,
    Place,
    Snapshot,
    copied,
    is_flag,
    is_fraction,
    l1_norms,
    places_of,
    put,
    unchanged,
)
from workers.training.dispatch_modes import (
    TF32_PRECISION,
    ComparedNumbers,
    Draws,
    LastBits,
    Results,
    is_new,
)
from workers.training.errors import TaskError
from workers.training.random_state import RandomState
from workers.training.unevenness import differing, shuffled

Cause: TypeAlias = Literal[
    "mean", "sum", "count", "batch statistics", "dropout", "rounding", "unknown"
]

#: Samples of a check: two in each part, because a batch norm refuses a single one.
ROWS: Final = 4

#: Samples of a second comparison, if they fit. A loss that selects among the samples, such as the
#: 16 hardest, or those of one query, may select alike among a few.
MANY_ROWS: Final = 32

#: Tolerances, in multiples of the precision. The rounding of a sum of n terms grows as the root of
#: n, and the longest sum of a gradient has some 10^6 terms (tokens x samples). With half precision
#: and TF32, sums are in fp32 and only results are rounded: some 256 in a pass through a model.
_LONG_SUM: Final = 1000.0
_ROUNDINGS: Final = 16.0

#: Differences up to this multiple of the precision of fp32 need no measurement. Of 50 models, 45
#: differ by less than 6.
_USUAL_ROUNDINGS: Final = 32.0

#: Differences up to this multiple of the measured rounding (`LastBits`) are rounding. Of 60 models,
#: some of them chaotic, none exceeds 2. The load balancing of a mixture of experts, with its usual
#: coefficient of 0.001, differs by 140.
_TIMES_ROUNDING: Final = 16.0

#: For a larger relative difference rounding is not measured: the tolerance alone decides.
_MOST_ROUNDING: Final = 0.01

#: Largest distance of a mean from the line between its parts, as a share of that line.
_MEAN_TOLERANCE: Final = 0.01

#: Two numbers may be equal but for rounding if their relative distance is smaller.
_EQUAL_TOLERANCE: Final = 1e-4

#: Factor for the loss of the whole in the search for rounding, so that all numbers are rounded
#: differently whatever the parts are.
_OTHER_SCALE: Final = 0.7

#: Largest relative difference of two computations of an element of a gradient. They agree to some
#: 1e-6 unless the element is zero but for rounding: then they differ completely.
_ROUNDED_DIFFERENCE: Final = 0.1

#: Share of such elements above which a gradient is only rounding. Some are next to zero in any
#: gradient. If one tensor has the biases of query, key and value, those of the key are a third.
_ROUNDED_SHARE: Final = 0.1


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
    count_name: str,
    rows: int,
    accumulator: Accumulator | None,
    buffers: dict[Place, BufferChange],
    finds_rounding: bool = False,
) -> list[PartsError] | None:
    """Compute some samples of a batch at once and in two parts, and compare both.

    The check takes the memory of a part of `rows` samples; without gradients, that of a forward
    pass without backward pass. It may run out of memory, and changes nothing. Fewer than two
    samples give no finding.

    Args:
        model: The model of `loss`: the check examines its buffers, modes and dropouts.
        batch: A batch that `loss` accepts and `rows_of` can count.
        loss: Returns the loss of some samples, given the place of the first in the check.
        weight: Returns the number of items of a part, which multiplies its mean loss before it is
            added. `None`: losses are added as they are.
        count_name: Name of the argument with the item count of the batch, for messages.
        rows: Number of samples that fit. If more than `ROWS`, up to 32 are compared as well.
        accumulator: Sums the gradients; its present sums are lost. `None`: only losses are
            compared, and wrong gradients remain unnoticed.
        buffers: Updated with the buffers that a pass changes, and how.
        finds_rounding: Whether to examine each parameter, which takes its gradients once more, on
            the host.

    Returns:
        The most serious other dependence of the result on how a batch is cut: `unknown`, or `batch
            statistics` and `dropout`, or `rounding`. `None`: inconclusive, as with samples without
            weight.

    Raises:
        PartsError: The added losses are a `mean` instead of a sum, a `sum` instead of a mean, or a
            mean over another `count`.
        TaskError: A value of the batch cannot be cut.
    """
    kind = _LossComparison if accumulator is None else _Comparison
    of = partial(kind, model, loss, weight, accumulator or Accumulator([]), finds_rounding)
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
    if norms and rows < ROWS:  # batch norms refuse a single sample
        return by_norms
    with unchanged(model):
        comparisons = _compared(of, batch, (rows, many), buffers)
        compared = comparisons[-1]
        for module, name in compared.drifting:
            raise PartsError(f"{_named(module, name)} {_BUFFER}", "batch statistics")
        if compared.hidden is not None:
            return [compared.hidden]
        adds_up = compared.is_right
        if adds_up and not any(each.is_conclusive for each in comparisons):
            return None
        noise = compared.noise() if adds_up else []
        others = {module: _named(module, name) for module, name in compared.not_additive}
        others = {module: name for module, name in others.items() if module not in norms}
        if not adds_up:
            # In evaluation mode, a sum or a mean can be recognised.
            with unchanged(model), _evaluation_mode(model):
                right = compared.adds_up(in_evaluation=True)
            if not right:
                # Evaluation mode does not change norms without running statistics.
                keeps_none = any(each.running_mean is None for each in norms)
                return by_norms if keeps_none else _wrong(compared, count_name, _hint(model))
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
    """Whether a module is a batch norm that uses the statistics of its present samples."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and (module.training or module.running_mean is None)


def _compared(
    of: Callable[[Batch], _Comparison],
    batch: Batch,
    rows: tuple[int, int],
    buffers: dict[Place, BufferChange],
) -> list[_Comparison]:
    """Compare few samples for each way in which they differ, then many; stop on a failure."""
    done: list[_Comparison] = []
    few, many = rows
    for places in [*differing(batch, few), *([shuffled(batch, many)] if many > few else [])]:
        if done:
            done[-1]._whole_gradients.clear()  # only the last one is examined for rounding
        try:
            one = of(samples_at(batch, places))
            one.adds_up()
        except Exception as error:
            if isinstance(error, TaskError) or oom.classify(error).kind is not FailureKind.OTHER:
                raise
            oom.drop_frames(error)
            # A loss may need the order of the batch: packed sequences are sorted by their lengths.
            one = of(samples_at(batch, sorted(places)))
            one.adds_up()
        done.append(one)
        if not one.is_right or one.not_additive or one.drifting or one.hidden is not None:
            break
    adds_up = not any(each.not_additive for each in done) and all(each.is_right for each in done)
    for place in {place for each in done for place in each.once}:
        once = [each.once.get(place, True) for each in done]
        means = [each.is_right and place in each.means for each in done]
        sums = [adds_up and (place in each.sums or place not in each.once) for each in done]
        buffers[place] = (
            "once" if all(once) else "mean" if all(map(or_, once, means))
            else "sum" if all(sums) else "other"
        )  # fmt: skip
    return done


def _wrong(compared: _Comparison, count_name: str, hint: str) -> list[PartsError]:
    """Return an error of unknown cause, or raise one of a known cause."""
    cause = compared.cause()
    sentence = compared.unknown if cause == "unknown" else _SENTENCES[cause]
    sentence = sentence.replace("COUNT", count_name)
    error = PartsError(sentence if cause in {"mean", "sum"} else sentence + hint, cause)
    if cause == "unknown":
        return [error]
    raise error


@dataclass
class _Comparison:
    """The comparison of some samples in two parts with the same samples at once."""

    #: The message if the loss is neither a sum nor a mean.
    unknown: ClassVar[str] = (
        "the parts of a batch do not add up to the whole, and the loss is neither the sum nor the "
        "mean of its samples; a loss that compares samples with each other cannot be cut"
    )

    _model: nn.Module
    _loss: Callable[[Batch, int], Tensor]
    _weight: Callable[[Batch], float] | None
    _sums: Accumulator
    _finds_rounding: bool
    _batch: Batch

    def __post_init__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks
        #: Makes the context in which `_note_precision` gets the tensors that autograd saves.
        self._saved_hooks: Callable[[], AbstractContextManager[object]] = partial(
            hooks, self._note_precision, lambda saved: saved
        )

    def adds_up(self, *, in_evaluation: bool = False) -> bool:
        """Compute; return, and store, whether the parts add up. NaN and infinity show nothing."""
        self.is_right = self._adds_up(in_evaluation=in_evaluation)
        if not self.is_right:
            self.not_additive += [place for place in self.means if place[1] in place[0]._buffers]
        return self.is_right

    def _adds_up(self, *, in_evaluation: bool) -> bool:
        rows = rows_of(self._batch)
        half, start = rows // 2, Snapshot(places_of(self._model.modules(), small=True))
        self._precision = 0.0
        #: Why other parts may not add up, although the difference here is small; `None`: they do.
        self.hidden: PartsError | None = None
        #: Loss, and gradient along the weights, of the whole and of both parts.
        self._points: list[tuple[float, float]] = []
        #: Tables whose rows the first pass that reads them shortens; later passes do not.
        self._shortened = _shortened(self._model)
        self._is_whole_table_read = False
        self._kinks: list[dict[object, set[object]]] = []
        self._numbers: list[list[float]] = []
        self._sums.begin(2 * rows, 1)
        random = RandomState(torch.device("cpu"))
        scale = _OTHER_SCALE if self._finds_rounding else 1.0
        try:
            with Draws(constant=False) as of_whole:
                whole, _ = self._add(self._batch, 0, scale, is_whole=True)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self._saved_hooks = partial(Results, self._note_precision)  # torch.func refuses hooks
            start.restore()
            random.restore()
            with Draws(constant=False) as of_whole:
                whole, _ = self._add(self._batch, 0, scale, is_whole=True)
        #: Negated gradients of the whole, if parameters are examined for rounding.
        self._whole_gradients = [
            (parameter, own.to("cpu", copy=True))
            for parameter, own in (self._sums.pairs if self._finds_rounding else ())
        ]
        after, sizes = start.changed(restore=True), l1_norms(self._model, start)
        random.restore()
        with Draws(constant=False) as of_part:
            first, length = self._add(part_of(self._batch, 0, half), 0)
        one = start.changed(restore=True)
        second, other = self._add(part_of(self._batch, half, rows - half), half)
        two = start.changed(restore=True)
        #: Other values of the model that each further pass changes again.
        self.drifting = [
            place
            for place, size in l1_norms(self._model, start).items()
            if size != sizes.get(place)
            and not (math.isnan(size) and math.isnan(sizes[place]))
            and place[0] not in self._shortened
        ]
        if self._is_whole_table_read:  # also rows that another part shortens
            self.drifting += [(module, "weight") for module in self._shortened]
        numbers = self._compare_buffers(start, after, (one, two), half, rows)
        self.is_conclusive = bool(length and other)
        # If an operator with a kink follows a reduction over the samples, the samples of a check may
        # be on one side of the kink only.
        whole_kinks, *kinks = self._kinks
        if any(
            all(each.get(of, set()) - known for each in kinks) for of, known in whole_kinks.items()
        ):
            self.hidden = PartsError(_KINK)
        fine = self._precision < TF32_PRECISION / 2
        self._tolerance = self._precision * (_LONG_SUM if fine else _ROUNDINGS)
        self.not_additive += [
            each for each in numbers if self._loss_uses(each, after[each], start, half)
        ]
        if not math.isfinite(whole) or not math.isfinite(first + second):
            return not math.isfinite(whole)
        # Draws for single samples may be rare, and change nothing here.
        if not in_evaluation and of_whole.shapes != of_part.shapes:
            return False
        off = abs(first + second - whole), _norm([own for _, own in self._sums.pairs])
        lengths = abs(first) + abs(second), length + other
        return self._is_rounding(off, lengths, start, random)

    def _is_rounding(
        self,
        off: tuple[float, float],
        lengths: tuple[float, float],
        start: Snapshot,
        random: RandomState,
    ) -> bool:
        """Return whether whole and parts differ only by rounding, and set `hidden`.

        `off` are the differences of loss and gradient, `lengths` the sizes of loss and gradient.
        """

        def is_within(share: float) -> bool:
            return off[0] <= share * lengths[0] and off[1] <= share * lengths[1]

        is_close = is_within(self._tolerance)
        if is_close and self.hidden is None and self._compares(start, random):
            self.hidden = PartsError(_KINK)
        usual = _USUAL_ROUNDINGS * torch.finfo(torch.float32).eps
        is_measurable = self._precision <= TF32_PRECISION and is_within(_MOST_ROUNDING)
        if is_within(usual) or self.hidden is not None or not is_measurable:
            return is_close
        of_loss, of_gradient = self._rounding(start)
        if off[1] > max(usual * lengths[1], _TIMES_ROUNDING * of_gradient):
            self.hidden = PartsError(_COUPLED, "batch statistics") if is_close else None
            return is_close
        return off[0] <= max(self._tolerance * lengths[0], _TIMES_ROUNDING * of_loss)

    def _rounding(self, start: Snapshot) -> tuple[float, float]:
        """Return by how much rounding changes the loss of the whole, and the norm of the change of
        its gradient. The sums of the comparison are lost, so `noise` finds nothing afterwards.
        """
        losses, random = list[float](), RandomState(self._sums.loss[0].device)
        self._whole_gradients.clear()
        self._sums.begin(2 * rows_of(self._batch), 1)
        for scale in (1.0, _OTHER_SCALE):
            random.restore()
            with LastBits() if scale < 1 else nullcontext():
                losses.append(self._add(self._batch, 0, scale, is_whole=scale == 1)[0])
            start.restore()
        del self._points[3:]
        return abs(losses[0] - losses[1]), _norm([own for _, own in self._sums.pairs])

    def _compare_buffers(
        self,
        start: Snapshot,
        after: dict[Place, BufferValue],
        of_parts: tuple[dict[Place, BufferValue], dict[Place, BufferValue]],
        half: int,
        rows: int,
    ) -> list[Place]:
        """Compare the changes of buffers by the whole with those by each part, the first of `half`
        rows. Return the places of numbers that parts change otherwise.
        """
        #: For each buffer that a pass changes: whether it changes equally for any samples.
        self.once: dict[Place, bool] = {}
        #: Buffers that become the mean of those of the parts, such as a stored loss.
        self.means: list[Place] = []
        #: Buffers to which each part adds.
        self.sums: list[Place] = []
        #: Buffers for which the parts do not add up to the whole.
        self.not_additive: list[Place] = []
        numbers: list[Place] = []
        for place, at in after.items():
            before = start.saved[place]
            parts = [each.get(place, before) for each in of_parts]
            self.once[place] = all(_nearly_equal(part, at, before) for part in parts)
            added = before if is_flag(before) else parts[0] + parts[1] - before
            if self.once[place]:
                continue
            if _nearly_equal(added, at, before):
                self.sums += [] if is_flag(before) else [place]
            else:
                mean = (half * parts[0] + (rows - half) * parts[1]) / rows
                is_mean = is_fraction(at) and _nearly_equal(mean, at, before)
                is_buffer = place[1] in place[0]._buffers
                (self.means if is_mean else self.not_additive if is_buffer else numbers).append(
                    place
                )
        return numbers

    def _compares(self, start: Snapshot, random: RandomState) -> bool:
        """Whether the loss of the whole changes if a number that no part has, such as its mean, is
        smaller or larger: then the comparisons of some parts may differ from those of the whole.
        """
        whole, *parts = self._numbers
        others = sorted(number for each in parts for number in each)
        close = max(_EQUAL_TOLERANCE, self._tolerance)
        if not any(is_new(number, others, close) for number in whole):
            return False
        losses = []
        for way in (0, -1, 1):
            random.restore()
            try:
                with (
                    torch.set_grad_enabled(bool(self._sums.parameters)),
                    ComparedNumbers(others, close, way, rows_of(self._batch)),
                ):
                    loss = self._loss(self._batch, 0)
                losses.append(float(loss.detach()))
                del loss  # free its activations before the next pass
            except Exception as error:
                if oom.classify(error).kind is not FailureKind.OTHER:
                    raise
                oom.drop_frames(error)  # a loss may refuse its values, such as by `assert`
            start.restore()
        at, near = self._points[0][0], self._tolerance * abs(self._points[0][0])
        return bool(losses) and abs(losses[0] - at) <= near < max(abs(at - each) for each in losses)

    def _loss_uses(self, place: Place, after: BufferValue, start: Snapshot, rows: int) -> bool:
        """Whether the loss of the first rows uses a number that a pass has changed. It does not if
        a module only stores its last loss there.
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
        """Add a part to the sums, or subtract the whole; return its loss and gradient norm.

        The gradients in the model have the same sign as in a step: hooks may depend on it.
        """
        weight = 1.0 if self._weight is None else float(self._weight(part))
        if not weight:  # no items add nothing
            self._points.append((0.0, 0.0))
            self._kinks.append({})
            self._numbers.append([])
            return 0.0, 0.0
        along, norms = list[Tensor](), list[Tensor]()

        def note(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
            new = gradient if scale == 1 else gradient / scale
            along.append(torch.dot(parameter.detach().flatten(), new.flatten()).real.double())
            norms.append(torch.linalg.vector_norm(new).double())
            return new.neg() if is_whole else new

        with self._saved_hooks():
            with ComparedNumbers() as compared:
                loss = self._loss(part, first)
            self._numbers.append(compared.numbers)
            self._kinks.append(kinks_of(loss))
            readers = readers_of(loss, self._shortened.values()) if self._shortened else set[str]()
            self._is_whole_table_read |= not all(each.startswith("Embedding") for each in readers)
            self._sums.add(rows_of(part), loss, weight * scale, note)
        value = float(self._note_precision(loss.detach()))
        self._points.append((value, float(sum(along)) / weight))
        return value * weight, float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def noise(self) -> list[str]:
        """Return the parameters whose gradient is only rounding, with that share of it; call it
        after `adds_up`.
        """
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        left, found = dict(self._sums.pairs), []
        for parameter, whole in self._whole_gradients:
            rest = left[parameter].cpu()  # the parts minus the whole
            largest = torch.maximum(whole.abs(), (rest - whole).abs())
            noise = rest.abs() > _ROUNDED_DIFFERENCE * largest
            share = int(noise.sum()) / max(1, int((largest > 0).sum()))
            if share > _ROUNDED_SHARE and parameter in names:
                found.append(f"{share:.0%} of the gradient of {names[parameter]}")
        return found

    def _note_precision(self, saved: Tensor) -> Tensor:
        """Note the precision with which a gradient is computed."""
        if saved.is_floating_point():
            precision = torch.finfo(saved.dtype).eps
            if saved.is_cuda and saved.dtype == torch.float32:
                precision = TF32_PRECISION
            self._precision = max(self._precision, precision)
        return saved

    def cause(self) -> Cause:
        """Return the likely cause of losses and gradients that did not add up."""
        (whole, _), (first, _), (second, _) = self._points
        mean: Cause = "mean" if self._weight is None else "count"
        if not math.isfinite(first + second):  # the mean of no items is NaN
            return mean
        if self._weight is not None and abs(first + second - whole) <= self._tolerance * abs(whole):
            return "sum"
        # A mean lies between its parts, by the same share in the loss and in the gradient.
        points = torch.tensor(self._points, dtype=torch.float64)
        at, one, other = points / points.abs().amax(0).clamp(min=1e-300)
        way = one - other
        share = ((at - other) @ way / (way @ way).clamp(min=1e-300)).clamp(0, 1)
        off = torch.linalg.vector_norm(at - other - share * way)
        near = self._tolerance + _MEAN_TOLERANCE * torch.linalg.vector_norm(way)
        return mean if bool(off <= near) else "unknown"


@dataclass
class _LossComparison(_Comparison):
    """The comparison of the losses, without gradients, of some samples in two parts and at once."""

    unknown: ClassVar[str] = (
        "the losses of the parts of a batch do not add up to that of the whole; if it is a mean "
        "over items, and samples have unequally many (padding, ignored labels, class weights), "
        "return the sum over the items (reduction='sum') and hand over their number in the whole "
        "batch (COUNT); a loss that compares samples with each other cannot be cut"
    )

    def _add(
        self,
        part: Batch,
        first: int,
        scale: float = 1.0,  # noqa: ARG002 - for gradients
        *,
        is_whole: bool = False,  # noqa: ARG002 - for gradients
    ) -> tuple[float, float]:
        """Compute the loss of a part; return it, and a norm that is 1 if the part has items."""
        weight = 1.0 if self._weight is None else float(self._weight(part))
        value, compared = 0.0, ComparedNumbers()
        if weight:
            with torch.no_grad(), Results(self._note_precision), compared:
                value = float(self._loss(part, first))
        self._numbers.append(compared.numbers)
        self._points.append((value, value))
        self._kinks.append({})
        return value * weight, float(bool(weight))

    def cause(self) -> Cause:
        """Return the likely cause: a sum instead of a mean, a mean instead of a sum, or unknown."""
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
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and replace random draws by constants."""
    rests = [(each, each.dropout) for each in model.modules() if isinstance(each, nn.RNNBase)]
    model.eval()
    for rnn, _ in rests:  # cuDNN has no gradient for an RNN in eval mode
        rnn.train().dropout = 0.0
    try:
        with Draws(constant=True):
            yield
    finally:
        for rnn, dropout in rests:
            rnn.dropout = dropout


def _nearly_equal(one: BufferValue, other: BufferValue, before: BufferValue) -> bool:
    """Whether two later values of a buffer or number are equal but for rounding."""
    one, other, before = (torch.as_tensor(each) for each in (one, other, before))
    if one.shape != other.shape or not other.is_floating_point():
        return torch.equal(one, other)
    precision = torch.finfo(other.dtype).eps
    rounding = max(1e-6, precision * (_LONG_SUM if precision < TF32_PRECISION / 2 else _ROUNDINGS))
    largest = max(float(each.abs().max()) if each.numel() else 0.0 for each in (other, before))
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _named(module: nn.Module, name: str) -> str:
    return f"{name} ({type(module).__name__})"


def _hint(model: nn.Module) -> str:
    """Return a hint for parts that do not add up: the first dimension may be time."""
    first = (
        _named(module, name)
        for name, module in model.named_modules()
        if getattr(module, "batch_first", True) is False
    )
    return next((f"; {each} {_TIME_FIRST}" for each in first), "")


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all tensors as one vector."""
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))] if tensors else []
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


_NORM: Final = (
    "normalises over the samples that are computed together, so the result depends on how a batch "
    "is cut (batch statistics); use GroupNorm or LayerNorm, or put it into eval mode"
)
_KINK: Final = (
    "the loss applies abs, clamp, relu, maximum or an `if` to a sum or mean over samples, so the "
    "parts of a batch may be on another side of the kink than the whole; apply it to each sample, "
    "before the mean"
)
_COUPLED: Final = (
    "a small term of the loss depends on what the samples of a batch have in common, such as the "
    "load balancing of a mixture of experts (batch statistics), so the result depends on how a "
    "batch is cut; compute it for each sample, or leave it out (in transformers "
    "output_router_logits=False)"
)
_BUFFER: Final = (
    "is changed by each pass in a way that depends on how a batch is cut (batch statistics); "
    "change it after the step, or put the module into eval mode"
)
_DROPOUT: Final = (
    "the model draws from torch's own random numbers, or those of Python or NumPy for each sample, "
    "so the result depends on how a batch is cut (dropout); use nn.Dropout modules in place of "
    "functional.dropout, which become keyed by sample if they are in the model that was handed "
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
    "count": "the loss of a part is a mean over items, and samples have unequally many (padding, "
    "ignored labels, class weights), so parts get wrong weights; return the sum over the "
    "items (reduction='sum') and hand over their number, or the sum of their weights, in the whole "
    "batch (COUNT); if it is no mean, but a root or a ratio of sums over the samples, or has a term "
    "such as the load balancing of a mixture of experts, it cannot be cut",
}
