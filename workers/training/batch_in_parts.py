"""The gradient of each batch, added up over the parts of the batch that fit in memory.

All trainings use this driver. It refuses losses whose parts do not add up to the whole batch. It
gives each part the random numbers and buffers that one pass over the whole batch would use, and
after an out-of-memory it continues with the part that failed. Releases no memory (`workers/elastic`
does), and updates no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from workers import oom
from workers.resilience.attempts import Attempts, OutOfBatchError, RetryRules
from workers.settings import FailureKind
from workers.training.accumulator import Accumulator, operators_of
from workers.training.batches import (
    Batch,
    copied_values,
    part_of,
    rows_of,
    scalar_loss,
    tensors_in,
    versions_of,
)
from workers.training.buffers import (
    BufferChange,
    BufferValue,
    Place,
    Snapshot,
    places_of,
    put,
    unchanged,
)
from workers.training.dispatch_modes import Widened
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts
from workers.training.optimizers import allocate_states
from workers.training.parts import MANY_ROWS, ROWS, PartsError, check_parts
from workers.training.random_state import RandomState
from workers.training.unevenness import PartsCheckSchedule

R = TypeVar("R")

#: Names under which modules keep their dropout probability.
_OF_DROPOUT: Final = "p", "dropout", "dropout_p"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsCheckOptions:
    """How `BatchInParts` checks that the parts of a batch add up to the whole batch."""

    accept: Callable[[Sequence[PartsError]], Mapping[str, str]]
    """Returns one sentence to report for each cause among the findings, or raises."""
    report: Callable[[str], object]
    """Called with each new sentence."""
    count_name: str = "count"
    """Name of the argument that gives the loss the item count of the whole batch, for messages."""
    finds_rounding: bool = False
    """Whether to find parameters whose gradient is only rounding."""
    memory_factor: int = 1
    """Memory of one sample in the check, as a multiple of its memory in a part."""
    loss_may_fail: bool = False
    """Whether a batch is computed as a whole if its loss raises for a subset of the samples."""


class BatchInParts:
    """The gradient sums of one model, and what is known about cutting its batches."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        sums: Accumulator,
        options: PartsCheckOptions | None,
        *,
        draws: bool = False,
    ) -> None:
        """Make the `nn.Dropout` modules of a model keyed by seed and sample.

        Args:
            model: On its device.
            seed: For dropout.
            sums: Accumulates the gradients of the trained parameters.
            options: Of the checks; `None`: the parts are known to add up.
            draws: Whether samples always draw torch's random numbers as they are computed.
        """
        self.model, self.sums, self._seed = model, sums, seed
        self._options, self.always_draws = options, draws
        self.compute: Callable[[int, Callable[[], None]], None] = lambda _, part: part()
        """Runs a part of this many rows; it may call the part again after a failure."""
        self.parts: list[int] = []
        """Rows of each part of the last batch."""
        self.most_rows: int | None = None
        """Upper limit for the rows of a part; `None`: as many as fit."""
        self.checking = False
        """Whether the loss is being called for a check, and not to train."""
        self.forget_model()

    def forget_model(self) -> None:
        """Forget all that is known of the model: its dropouts and what its passes change."""
        self.dropouts, self.schedule = Dropouts(self.model, self._seed), PartsCheckSchedule()
        self.modules = list(self.model.modules())
        places = places_of(self.modules, small=True)
        self.buffers: dict[Place, BufferChange] = dict.fromkeys(places, "unknown")
        """Buffers and numbers that passes may change, with the way in which they change."""
        self._numbers = [
            (vars(module), name)
            for module, name in self.buffers
            if type(vars(module).get(name)) in {int, float}
        ]
        self.draws = self.always_draws
        """Whether samples draw torch's own random numbers as they are computed."""
        self.writes: bool | None = None
        """Whether the loss writes into its batch; `None`: it was not called yet."""
        self.operators = set[str]()
        """Names of the operators that computed the losses of parts."""
        self.was_checked = False
        """Whether a check has compared parts with the whole."""
        self._works_in_fp32: bool | None = None
        """Whether the loss works in fp32 where autocast asks for half precision; `None`: not
        tried.
        """
        self.is_repeatable = True
        """Whether samples have the same gradients if they are computed again, or in other parts."""

    def allocate(self) -> None:
        """Allocate sums for the trained parameters, which never change here."""

    def check_batch(self, one: OneBatch, most_rows: int, *, is_cut: bool) -> TaskError | None:
        """Check that the parts of a batch add up, unless a batch of its form was checked. Return
        why the batch cannot be cut, if it need not be cut now; else `None`.

        Raises:
            PartsError: The parts do not add up, and the user does not or cannot accept that.
            TaskError: The batch must be cut, and cannot be.
        """
        options, rows = self._options, most_rows
        if options is None:
            return None
        rows //= options.memory_factor
        has_room = min(rows, one.rows) > 1
        if not (has_room or is_cut) or not self._is_check_due(one, has_room):
            return None
        found: list[PartsError] | None = []
        self.checking, self.was_checked = True, self.was_checked or has_room
        try:
            if has_room:
                found = self._compare(one, rows, options)
            if is_cut and all(each.cause == "rounding" for each in found or ()):
                more = self._compare_losses(one, rows, options)
                found = [*more, *(found or ())] if more else found
        except TaskError as error:
            if is_cut or isinstance(error, PartsError):
                raise
            return error
        except Exception as error:
            if not options.loss_may_fail or oom.classify(error).kind is not FailureKind.OTHER:
                raise
            text = " ".join(str(error).split())
            uncut = TaskError(
                f"the loss fails with some of the {one.rows} samples "
                f"({type(error).__name__}: {text}); remove from the batch values that "
                "belong to all samples and only happen to have as many rows, such as class "
                "weights, and keep no state whose size depends on the batch"
            )
            if is_cut:
                raise uncut from error
            return uncut  # the batch is computed as a whole, and may fail there
        finally:
            self.checking = False
        if found is None:  # inconclusive: check the next batch
            return None
        sentences = options.accept(found)
        self.draws = self.always_draws or any(each.cause == "dropout" for each in found)
        self.is_repeatable &= all(each.cause == "rounding" for each in found)
        for sentence in self.schedule.done(sentences):
            options.report(sentence)
        return None

    def _compare(
        self, one: OneBatch, rows: int, options: PartsCheckOptions
    ) -> list[PartsError] | None:
        """Compare the whole with its parts; in fp32 if possible, where rounding is small. That
        takes twice the memory of half precision.
        """
        if rows > 3 and self._can_use_fp32(one):
            try:
                with Widened():
                    return self._check(one, rows // 2, options, self.sums)
            except TaskError:
                raise
            except Exception as error:
                if oom.classify(error).kind is not FailureKind.OTHER:
                    raise
                oom.drop_frames(error)
            self._works_in_fp32 = False
        return self._check(one, rows, options, self.sums)

    def _check(
        self, one: OneBatch, rows: int, options: PartsCheckOptions, sums: Accumulator | None
    ) -> list[PartsError] | None:
        return check_parts(
            self._all_of(one.loss),
            one.batch,
            one.value_of,
            weight=one.weight,
            count_name=options.count_name,
            rows=rows,
            accumulator=sums,
            buffers=self.buffers,
            finds_rounding=options.finds_rounding,
        )

    def _can_use_fp32(self, one: OneBatch) -> bool:
        """Whether this loss uses half precision and works in fp32; two samples are tried."""
        if self._works_in_fp32 is None:
            mode, self._works_in_fp32 = Widened(), False
            try:
                with unchanged(self._all_of(one.loss)), torch.no_grad(), mode:
                    one.value_of(part_of(one.batch, 0, min(2, one.rows)), 0)
                self._works_in_fp32 = mode.did
            except Exception as error:
                if oom.classify(error).kind is FailureKind.CONTEXT_CORRUPTED:
                    raise
                oom.drop_frames(error)
        return self._works_in_fp32

    def _compare_losses(
        self, one: OneBatch, rows: int, options: PartsCheckOptions
    ) -> list[PartsError]:
        """Compare the losses of more samples than fit with gradients; return the findings.

        A forward pass alone keeps the activations of one or two layers. So twice the samples take
        no more memory than a part that recomputes its blocks. Four samples are tried in any case.
        If they do not fit, fewer are compared.
        """
        many = min(max(2 * rows, ROWS), one.rows, MANY_ROWS)
        while many > max(1, rows):
            try:
                with Widened() if self._can_use_fp32(one) else nullcontext():
                    found = self._check(one, many, options, None)
            except TaskError:
                raise
            except Exception as error:
                kind = oom.classify(error).kind
                if kind is FailureKind.CONTEXT_CORRUPTED:
                    raise
                oom.drop_frames(error)
                # Any other failure comes from the loss, such as one that takes a gradient itself.
                many = 0 if kind is FailureKind.OTHER else many // 2
            else:
                return found or []
        return []

    def _all_of(self, loss: object) -> nn.Module:
        """Return the model with all modules that the loss refers to: they may change as well."""
        found = [each for each in _values_of(loss) if isinstance(each, nn.Module)]
        others = [
            each
            for each in dict.fromkeys(found)
            if each not in self.modules and not any(map(is_lazy, each.parameters()))
        ]
        return nn.ModuleList([self.model, *others]) if others else self.model

    def _is_check_due(self, one: OneBatch, *others: object) -> bool:
        """Whether no batch of this form was checked with the model in its present mode."""
        modes = [
            (
                each.training,
                *(p for name in _OF_DROPOUT if isinstance(p := vars(each).get(name), float)),
            )
            for each in self.modules
        ]
        # Zero may be the weight of a loss term that is not in use yet.
        zeros = (values.get(name) == 0 for values, name in self._numbers)
        own = _fingerprint_of(one.loss)
        return self.schedule.due(one.batch, one.rows, *modes, *zeros, one.weight, *own, *others)


def _has_late_hook(parameter: Tensor) -> bool:
    """Whether a parameter has a hook of `register_post_accumulate_grad_hook` or
    `register_multi_grad_hook`; the latter creates functions of its own.
    """
    hooks = (parameter._backward_hooks or {}).values()
    of_several = vars(torch.autograd.graph)
    return bool(parameter._post_accumulate_grad_hooks) or any(
        getattr(hook, "__globals__", None) is of_several for hook in hooks
    )


def _fingerprint_of(loss: Any) -> Iterator[object]:  # noqa: ANN401 - any callable
    """Yield values that distinguish losses with the same code: short texts and switches among the
    arguments, closure and globals of a loss, such as the `reduction` of a function that it calls.
    Numbers may change in each step, so only whether one is zero counts, as the weight of a term
    that is used later.
    """
    function = loss.func if isinstance(loss, partial) else loss
    yield getattr(function, "__code__", type(function))
    for value in _values_of(loss):
        mark = value if isinstance(value, str | bool) else getattr(value, "reduction", None)
        mark = value == 0 if type(value) in {int, float} else mark
        is_name = isinstance(mark, str) and mark.isidentifier()  # not the text of a step
        yield mark if is_name or isinstance(mark, bool) else None


def _values_of(loss: Any) -> Iterator[Any]:  # noqa: ANN401 - any callable
    """Yield what a loss refers to: bound arguments, defaults, closure and named globals."""
    if isinstance(loss, partial):
        yield from (*_values_of(loss.func), *loss.args, *loss.keywords.values())
        return
    yield getattr(loss, "__self__", loss)
    yield from getattr(loss, "__defaults__", None) or ()
    known = getattr(loss, "__globals__", {})
    yield from map(known.get, getattr(getattr(loss, "__code__", None), "co_names", ()))
    for cell in getattr(loss, "__closure__", None) or ():
        with suppress(ValueError):  # a variable without a value
            yield cell.cell_contents
    if not isinstance(loss, nn.Module):
        yield from getattr(loss, "__dict__", {}).values()


@dataclass
class OneBatch:
    """A batch that is being computed. Each part begins with the random numbers and buffers of the
    batch's beginning, so that all parts together compute what one pass would.
    """

    owner: BatchInParts
    batch: Batch
    rows: int
    loss: Callable[[Batch], object]
    """Returns the loss of some samples."""
    first: int
    """Number of the batch's first sample in the training; it keys dropout."""
    items: float
    """Items of the whole batch; the sum of its losses is divided by this."""
    weight: Callable[[Batch], float] | None = None
    """Returns the items of a part, which multiply its mean; `None`: the loss is a sum."""
    is_whole: bool = False
    """Whether the batch cannot be cut."""
    ranges: list[tuple[int, int]] | None = None
    """First row and number of rows of each range computed here, in order; `None`: all rows."""

    def __post_init__(self) -> None:
        owner = self.owner
        device = owner.sums.loss[0].device
        self._random = None if owner.always_draws else RandomState(device)
        self._is_drawn = False
        """Whether a part may have drawn random numbers since the batch began."""
        self._was_batch_written = False
        """Whether the loss has written into the batch in a part that is not finished."""
        self._whole_only: TaskError | None = None
        """Why the batch can only be computed as a whole."""
        self._per_part: Snapshot | None = None
        """Initial values of buffers that are reset before each part; `None`: nothing has begun."""
        self._initial = self._latest = Snapshot([])
        """Initial and latest values of the other buffers, which carry over from part to part."""
        self._combined = dict[Place, BufferValue]()
        """Means and sums over the samples of the parts so far, for buffers that become such."""

    def extend(self, first: int, rows: int) -> None:
        """Add a range of rows to compute after the others."""
        assert self.ranges is not None  # noqa: S101 - only for a batch of ranges
        self.ranges.append((first, rows))
        if self._per_part is not None:
            self.owner.sums.extend(rows)

    @property
    def is_done(self) -> bool:
        """Whether all parts are computed, so that only the update remains."""
        return self._per_part is not None and not self.owner.sums.remaining

    def advance(self, most_rows: int, scale: float = 1.0) -> int:
        """Compute the next part of at most `most_rows` rows, if any; return its rows. `scale`
        multiplies its gradients.

        After an out-of-memory, call it again: it continues with the part that failed.

        Raises:
            TaskError: The parts do not add up, or the batch must be cut and cannot be.
        """
        owner, sums = self.owner, self.owner.sums
        fits, most_rows = most_rows, min(most_rows, owner.most_rows or most_rows)
        is_cut = most_rows < self.rows or self.ranges is not None
        per_part = self._per_part or self._begin(fits, is_cut=is_cut)
        if self._whole_only is not None and is_cut:
            raise self._whole_only
        if sums.is_partly_added and not owner.is_repeatable:
            self._begin_sums()
        rows, at = sums.next_rows(most_rows), sums.done
        if rows:
            first = self._row_after(at)
            owner.parts = owner.parts if at else []

            def add() -> None:
                if self._was_batch_written:
                    raise TaskError(
                        "the loss has written into its batch for the first time, and its part must "
                        "be computed again, but its numbers have changed; load the batch again and "
                        "repeat the step, which then passes the loss a copy"
                    )
                # Undo what a failed attempt or the part before has changed.
                per_part.restore()
                (self._latest if at else self._initial).restore()
                part = self.batch if self.is_whole else part_of(self.batch, first, rows)
                total, weight = self.value(part, first, rows), self.weight
                if weight is not None:
                    items = weight(part)
                    # The mean of no items is NaN, and adds nothing.
                    total = total * items if items else torch.zeros_like(total)
                sums.add(rows, total, scale)

            owner.compute(rows, add)
            if owner.was_checked and self._needs_check(is_cut=bool(at or self.ranges)):
                # This part used or changed something that no check has covered: check again.
                owner.schedule.forget()
                self.undo()
                return rows
            self._was_batch_written = False
            self._latest = Snapshot(self._carried)
            self._combine(per_part, rows, begins=not at)
            owner.parts.append(rows)
        if not sums.remaining:
            for place, kept in self._final.items():
                put(place, kept)
        return rows

    def _combine(self, per_part: Snapshot, rows: int, *, begins: bool) -> None:
        """Combine what a finished part made of the buffers that are reset before each part."""
        changed, kinds = per_part.changed(), self.owner.buffers
        combined = self._combined = {} if begins else self._combined
        for place, kept in per_part.saved.items():
            new = changed.get(place, kept)
            if kinds[place] == "mean":
                combined[place] = combined.get(place, 0.0) + new * (rows / self.rows)
            elif kinds[place] == "sum":
                combined[place] = combined.get(place, kept) + new - kept
        self._final |= changed | combined

    def undo(self) -> None:
        """Restore buffers and random numbers to the values before the batch."""
        if self._is_drawn and self._random is not None:
            self._random.restore()
        if self._per_part is not None:
            self._per_part.restore()
            self._initial.restore()
            self._per_part = None

    def changed(self) -> list[Place]:
        """Return the buffers and numbers of the model that the parts so far have changed."""
        kept = () if self._per_part is None else (self._per_part, self._initial)
        return [place for each in kept for place in each.changed()]

    def _needs_check(self, *, is_cut: bool) -> bool:
        """Whether the losses used parameters or operators, or changed a buffer or number, that no
        earlier batch did. `is_cut`: whether the batch has more parts than this one.
        """
        owner = self.owner
        # A check may compute in another precision, hence with other operators than the first batch.
        has_more = 0 < self._operators_before < len(owner.operators)
        unknown = [place for place in self._initial.saved if owner.buffers[place] == "unknown"]
        if not is_cut or owner.sums.remaining:
            unknown = []  # each comparison waits for the card: compare once, at the end
        for place in self._initial.changed(unknown):
            owner.buffers[place], has_more = "other", True  # unless the next check finds more
        return has_more or len(owner.sums.used) > self._used_before

    def value(self, part: Batch, at: int, rows: int) -> Tensor:
        """Return the loss of a part of `rows` rows that begins at row `at`."""
        owner = self.owner
        if self._is_drawn and self._random is not None and not owner.draws:
            self._random.restore()
        self._is_drawn = True
        owner.dropouts.key(self.first + at, rows, owner.sums.loss[0].device)
        # Pass new containers, since a loss may remove values from them and be called again; and new
        # tensors if it may write into them, which another call would see.
        writable = owner.checking or owner.writes is not False
        given = copied_values(part, tensors=writable)
        before = versions_of(given)
        try:
            value = scalar_loss(self.loss(given))
        finally:
            changed = before != versions_of(given)
            owner.writes = bool(owner.writes) or changed
            self._was_batch_written |= changed and not writable
        if owner.was_checked and not owner.checking:
            owner.operators |= operators_of(value)
        return value

    def value_of(self, part: Batch, at: int) -> Tensor:
        """Return the loss of a part whose rows `rows_of` can count."""
        return self.value(part, at, rows_of(part))

    def _begin(self, most_rows: int, *, is_cut: bool) -> Snapshot:
        owner = self.owner
        owner.allocate()
        if not self.is_whole:
            self._whole_only = owner.check_batch(self, most_rows, is_cut=is_cut)
        self._begin_sums()
        self._used_before, self._operators_before = len(owner.sums.used), len(owner.operators)
        others = "other", "unknown"
        self._carried = [place for place, kind in owner.buffers.items() if kind in others]
        self._final = dict[Place, BufferValue]()
        self._initial = self._latest = Snapshot(self._carried)
        self._per_part = Snapshot(owner.buffers.keys() - self._carried)
        return self._per_part

    def _begin_sums(self) -> None:
        sums, ranges = self.owner.sums, self.ranges
        sums.begin(self.rows if ranges is None else 0, self.items)
        for _, rows in ranges or ():
            sums.extend(rows)

    def _row_after(self, at: int) -> int:
        """Return the row of the batch that follows the first `at` rows computed here."""
        for first, rows in self.ranges or ():
            if at < rows:
                return first + at
            at -= rows
        return at


class LoopBatches(BatchInParts):
    """The batches of a user's training loop: also chooses the size of each part."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        seed: int,
        rules: Callable[..., RetryRules],
        on_hazard: Callable[[str], None] | None,
        count_name: str = "count",
    ) -> None:
        """Allocate what outlives a step: sums of gradients, and the states of an Adam.

        Args:
            model: On its device. Its `nn.Dropout` modules become keyed by seed and sample.
            optimizers: The parameters of their groups are trained, if they require a gradient.
            seed: For dropout.
            rules: Makes the rules of attempts from a `starting_batch_size`.
            on_hazard: Called once for each hazard that a user may accept; `None`: all are refused.
            count_name: Name of the argument with the item count of the batch, for messages.
        """
        self._optimizers, self._rules, self._on_hazard = optimizers, rules, on_hazard
        self._attempts: Attempts | None = None
        options = PartsCheckOptions(
            accept=self._accepted,
            report=on_hazard or (lambda _: None),
            count_name=count_name,
            loss_may_fail=True,
        )
        super().__init__(model, seed, Accumulator([]), options)
        self.allocate()

    def run(
        self,
        batch: Batch,
        loss: Callable[[Batch], object],
        finish: Callable[[], R],
        *,
        first: int,
        count: float | None,
        scale: float = 1.0,
        share: float = 1.0,
        weight: Callable[[Batch], float] = rows_of,
    ) -> R:
        """Add up loss and gradient of a batch, and return the result of `finish`.

        Args:
            batch: Computed as a whole if its samples cannot be counted.
            loss: Returns the mean over the samples of a part; with `count`, the sum over its items.
            finish: Called after the last part, and again if it runs out of memory.
            first: Number of the batch's first sample in the training; it keys dropout.
            count: Items of the whole batch.
            scale: Factor for the gradients.
            share: Factor for a mean, if the batch is one of several of an update.
            weight: Returns the number of samples, or items, that the mean of a part is over.

        Raises:
            TaskError: Parts do not add up, or the batch does not fit as a whole and cannot be cut.
            OutOfBatchError: Not even one sample fitted within the waiting time of the rules.
        """
        uncut: TaskError | None = None
        if any(each.requires_grad and not each.is_leaf for each in tensors_in(batch)):
            raise TaskError(
                "the batch was computed from trained parameters, and each part needs that again; "
                "compute it inside the loss, or detach() it"
            )
        try:
            rows = rows_of(batch)
        except TaskError as error:
            rows, uncut = 1, error
        if not rows:
            raise TaskError("the batch has no samples; leave it out")
        if self._attempts is None or rows > self._attempts.rules.starting_batch_size:
            self._attempts = Attempts(self._rules(starting_batch_size=rows))
        one = OneBatch(
            owner=self,
            batch=batch,
            rows=rows,
            loss=loss,
            first=first,
            items=count or rows
            if count is not None
            else ((uncut is None and weight(batch)) or rows) / share,
            weight=weight if count is None and uncut is None else None,
            is_whole=uncut is not None,
        )

        def attempt(most_rows: int) -> list[R]:
            one.advance(most_rows, scale)
            return [finish()] if one.is_done else []

        done: list[R] = []
        try:
            while not done:
                # A check and its part are one attempt: the larger of both peaks is learned.
                done = self._attempts.run(attempt)
        except OutOfBatchError as error:
            if uncut is None:
                raise
            raise TaskError(
                f"{uncut}, or switch packing off (in TRL packing=False, padding_free=False); at "
                f"once it does not fit: {error}"
            ) from error
        finally:
            self.dropouts.forget()
            if not done:
                one.undo()
        return done[0]

    def allocate(self) -> None:
        """Allocate sums and states for what is trained now; if that is new, forget the model.

        Raises:
            TaskError: A hook needs the whole gradient, or the model is lazy or distributed.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        wanted = {each: None for group in groups for each in group["params"] if each.requires_grad}
        if any(map(_has_late_hook, wanted)):
            raise TaskError(
                "a parameter has a hook of register_post_accumulate_grad_hook or "
                "register_multi_grad_hook, which would get no gradient; remove it, and do its work "
                "after the step"
            )
        if isinstance(self.model, DistributedDataParallel) or any(map(is_lazy, wanted)):
            raise TaskError(
                "the model is DistributedDataParallel, whose gradients are exchanged by backward(), "
                "or lazy; hand over the model itself, after it was called once"
            )
        if self.sums.is_allocated_for(list(wanted)) and self.modules == list(self.model.modules()):
            return
        for optimizer in self._optimizers:
            allocate_states(optimizer)
        self.sums.allocate(list(wanted))
        self.forget_model()

    def _accepted(self, found: Sequence[PartsError]) -> Mapping[str, str]:
        """Return the sentence of each finding that the user accepts, keyed by cause.

        Raises:
            PartsError: The user does not or cannot accept a finding.
        """
        if found and (self._on_hazard is None or found[0].cause == "unknown"):
            raise found[0]
        return {each.cause: str(each) for each in found}
