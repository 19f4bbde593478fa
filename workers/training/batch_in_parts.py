"""The gradient of one batch after the other, each added up over the parts that fit in memory.

The one driver of all trainings: it refuses what would not add up, gives each part the random
numbers and buffers that one pass over the whole batch would have, and goes on where a part has run
out of memory. Gives no memory back (`workers/elastic` does), and updates no weights.
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
    one_number,
    own_values,
    part_of,
    rows_of,
    tensors_in,
    versions_of,
)
from workers.training.buffers import Kept, Kind, Place, Snapshot, places_of, put, unchanged
from workers.training.dispatch_modes import Widened
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts
from workers.training.optimizers import allocate_states
from workers.training.parts import MANY_ROWS, ROWS, PartsError, check_parts
from workers.training.random_state import RandomState
from workers.training.unevenness import PartsCheck

R = TypeVar("R")

#: Where modules say how much they drop.
_OF_DROPOUT: Final = "p", "dropout", "dropout_p"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How it is looked whether parts add up."""

    accepts: Callable[[Sequence[PartsError]], Mapping[str, str]]
    """From what was found to a sentence for each kind of it that is to be told; or it raises."""
    tell: Callable[[str], object]
    """Gets each sentence once."""
    counted: str = "count"
    """What tells the loss the items of the whole batch, for messages."""
    sees_rounding: bool = False
    """Whether parameters are looked at one by one."""
    part_share: int = 1
    """In the look a sample takes so many times the memory that it takes in a part."""
    may_fail: bool = False
    """Whether a batch is computed at once of which the loss fails with some of the samples."""


class BatchInParts:
    """The sums of one model, and what is known of how its batches can be cut."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        sums: Accumulator,
        look: Look | None,
        *,
        draws: bool = False,
    ) -> None:
        """Make the `nn.Dropout` modules of a model keyed by seed and sample.

        Args:
            model: On its device.
            seed: For dropout.
            sums: Of the gradients of what is trained.
            look: `None`: the parts are known to add up.
            draws: Whether samples always draw from torch's own random numbers as they come.
        """
        self.model, self.sums, self._seed = model, sums, seed
        self._look, self.always_draws = look, draws
        self.compute: Callable[[int, Callable[[], None]], None] = lambda _, part: part()
        """Computes a part of so many rows, which it may call again after a failure."""
        self.parts: list[int] = []
        """Rows of each part of the last batch."""
        self.most_rows: int | None = None
        """Of a part, at most; `None`: as many as fit."""
        self.checking = False
        """Whether a loss is asked for to see that parts add up, and not to train."""
        self.look_anew()

    def look_anew(self) -> None:
        """Know nothing of the model: neither its dropouts nor what its passes change."""
        self.dropouts, self.check = Dropouts(self.model, self._seed), PartsCheck()
        self.modules = list(self.model.modules())
        places = places_of(self.modules, small=True)
        self.buffers: dict[Place, Kind] = dict.fromkeys(places, "unknown")
        """Those that passes may change, and how."""
        self._numbers = [
            (vars(module), name)
            for module, name in self.buffers
            if type(vars(module).get(name)) in {int, float}
        ]
        self.draws = self.always_draws
        """Whether samples draw from torch's own random numbers as they come."""
        self.writes: bool | None = None
        """Whether a loss writes into its batch; `None`: none has been computed."""
        self.operators = set[str]()
        """With which the losses of parts were computed, by name."""
        self.has_looked = False
        """Whether it was looked whether parts add up."""
        self._widens: bool | None = None
        """Whether half precision that autocast asks for can be left out; `None`: not tried."""
        self.repeats = True
        """Whether samples that are computed again, or in other parts, have the same gradients."""

    def hold(self) -> None:
        """Have sums for what is trained now, which here is always the same."""

    def look_at(self, one: OneBatch, most_rows: int, *, is_cut: bool) -> TaskError | None:
        """See whether the parts of a batch add up, if none of its form was looked at; return why
        one cannot be cut that need not be.

        Raises:
            PartsError: They do not, and no user can accept it, or none does.
            TaskError: The batch must be cut, and cannot be.
        """
        look, rows = self._look, most_rows
        if look is None:
            return None
        rows //= look.part_share
        has_room = min(rows, one.rows) > 1
        if not (has_room or is_cut) or not self._is_due(one, has_room):
            return None
        found: list[PartsError] | None = []
        self.checking, self.has_looked = True, self.has_looked or has_room
        try:
            if has_room:
                found = self._compare(one, rows, look)
            if is_cut and all(each.cause == "rounding" for each in found or ()):
                more = self._look_at_losses(one, rows, look)
                found = [*more, *(found or ())] if more else found
        except TaskError as error:
            if is_cut or isinstance(error, PartsError):
                raise
            return error
        except Exception as error:
            if not look.may_fail or oom.classify(error).kind is not FailureKind.OTHER:
                raise
            said = " ".join(str(error).split())
            uncut = TaskError(
                f"the loss fails with some of the {one.rows} samples "
                f"({type(error).__name__}: {said}); leave out of the batch what belongs to all "
                "samples alike and only happens to have as many rows, such as weights of classes, "
                "and keep no state of a size that follows the batch"
            )
            if is_cut:
                raise uncut from error
            return uncut  # the batch is computed at once, and fails there or not at all
        finally:
            self.checking = False
        if found is None:  # the next batch may tell more
            return None
        told = look.accepts(found)
        self.draws = self.always_draws or any(each.cause == "dropout" for each in found)
        self.repeats &= all(each.cause == "rounding" for each in found)
        for sentence in self.check.done(told):
            look.tell(sentence)
        return None

    def _compare(self, one: OneBatch, rows: int, look: Look) -> list[PartsError] | None:
        """Compare the whole and its parts, in fp32 where that is possible: there rounding is small.
        It takes twice the memory of half precision.
        """
        if rows > 3 and self._can_widen(one):
            try:
                with Widened():
                    return self._check(one, rows // 2, look, self.sums)
            except TaskError:
                raise
            except Exception as error:
                if oom.classify(error).kind is not FailureKind.OTHER:
                    raise
                oom.drop_frames(error)
            self._widens = False
        return self._check(one, rows, look, self.sums)

    def _check(
        self, one: OneBatch, rows: int, look: Look, sums: Accumulator | None
    ) -> list[PartsError] | None:
        return check_parts(
            self._all_of(one.loss),
            one.batch,
            one.value_of,
            weight=one.weight,
            counted=look.counted,
            rows=rows,
            accumulator=sums,
            buffers=self.buffers,
            sees_rounding=look.sees_rounding,
        )

    def _can_widen(self, one: OneBatch) -> bool:
        """Whether this loss computes in half precision and could in fp32, as two samples show."""
        if self._widens is None:
            mode, self._widens = Widened(), False
            try:
                with unchanged(self._all_of(one.loss)), torch.no_grad(), mode:
                    one.value_of(part_of(one.batch, 0, min(2, one.rows)), 0)
                self._widens = mode.did
            except Exception as error:
                if oom.classify(error).kind is FailureKind.CONTEXT_CORRUPTED:
                    raise
                oom.drop_frames(error)
        return self._widens

    def _look_at_losses(self, one: OneBatch, rows: int, look: Look) -> list[PartsError]:
        """Compare the losses of more samples than fit with their gradients; return what was found.

        A forward pass alone keeps the activations of a layer or two: of twice as many samples no
        more than a part that recomputes its blocks. Four are tried in any case. Where they do not
        fit, fewer are compared.
        """
        many = min(max(2 * rows, ROWS), one.rows, MANY_ROWS)
        while many > max(1, rows):
            try:
                with Widened() if self._can_widen(one) else nullcontext():
                    found = self._check(one, many, look, None)
            except TaskError:
                raise
            except Exception as error:
                kind = oom.classify(error).kind
                if kind is FailureKind.CONTEXT_CORRUPTED:
                    raise
                oom.drop_frames(error)
                # Another failure is of the loss, such as one that takes a gradient itself.
                many = 0 if kind is FailureKind.OTHER else many // 2
            else:
                return found or []
        return []

    def _all_of(self, loss: object) -> nn.Module:
        """Return the model, with the other modules that a loss names: they may count as well."""
        found = [each for each in _values_of(loss) if isinstance(each, nn.Module)]
        others = [
            each
            for each in dict.fromkeys(found)
            if each not in self.modules and not any(map(is_lazy, each.parameters()))
        ]
        return nn.ModuleList([self.model, *others]) if others else self.model

    def _is_due(self, one: OneBatch, *others: object) -> bool:
        """Whether no batch of this form was looked at, of this model in this mode."""
        modes = [
            (
                each.training,
                *(p for name in _OF_DROPOUT if isinstance(p := vars(each).get(name), float)),
            )
            for each in self.modules
        ]
        # Such as the weight of a term that is to come.
        zeros = (values.get(name) == 0 for values, name in self._numbers)
        own = _marks_of(one.loss)
        return self.check.due(one.batch, one.rows, *modes, *zeros, one.weight, *own, *others)


def _is_hooked_late(parameter: Tensor) -> bool:
    """Whether it has a hook of `register_post_accumulate_grad_hook` or `register_multi_grad_hook`,
    which makes functions of its own.
    """
    hooks = (parameter._backward_hooks or {}).values()
    of_several = vars(torch.autograd.graph)
    return bool(parameter._post_accumulate_grad_hooks) or any(
        getattr(hook, "__globals__", None) is of_several for hook in hooks
    )


def _marks_of(loss: Any) -> Iterator[object]:  # noqa: ANN401 - any callable
    """Yield what tells a loss from another one of the same code: texts and switches among what it
    was made with and the globals that it names, such as the `reduction` of what it calls. Numbers
    may change in each step; of these it tells which are zero, as the weight of a term that is to
    come.
    """
    function = loss.func if isinstance(loss, partial) else loss
    yield getattr(function, "__code__", type(function))
    for value in _values_of(loss):
        mark = value if isinstance(value, str | bool) else getattr(value, "reduction", None)
        mark = value == 0 if type(value) in {int, float} else mark
        is_name = isinstance(mark, str) and mark.isidentifier()  # no text of one step
        yield mark if is_name or isinstance(mark, bool) else None


def _values_of(loss: Any) -> Iterator[Any]:  # noqa: ANN401 - any callable
    """Yield what a loss was made with, and the globals that it names."""
    if isinstance(loss, partial):
        yield from (*_values_of(loss.func), *loss.args, *loss.keywords.values())
        return
    yield getattr(loss, "__self__", loss)
    yield from getattr(loss, "__defaults__", None) or ()
    known = getattr(loss, "__globals__", {})
    yield from map(known.get, getattr(getattr(loss, "__code__", None), "co_names", ()))
    for cell in getattr(loss, "__closure__", None) or ():
        with suppress(ValueError):  # of a variable without a value
            yield cell.cell_contents
    if not isinstance(loss, nn.Module):
        yield from getattr(loss, "__dict__", {}).values()


@dataclass
class OneBatch:
    """A batch under way. Each part begins with the random numbers and buffers with which the batch
    began, so that all parts together do what one pass would.
    """

    owner: BatchInParts
    batch: Batch
    rows: int
    loss: Callable[[Batch], object]
    """From some samples to their loss."""
    first: int
    """The number of the batch's first sample, by which dropout is keyed."""
    items: float
    """Of the whole batch: by these the sum of its losses is divided."""
    weight: Callable[[Batch], float] | None = None
    """By what the loss of a part is multiplied: how many items a mean is of."""
    is_whole: bool = False
    """Whether it cannot be cut."""
    ranges: list[tuple[int, int]] | None = None
    """The first row and the number of rows of each range that is computed here, one after the
    other; `None`: all rows are."""

    def __post_init__(self) -> None:
        owner = self.owner
        device = owner.sums.loss[0].device
        self._random = None if owner.always_draws else RandomState(device)
        self._is_drawn = False
        """Whether a part may have drawn random numbers since."""
        self._is_spoilt = False
        """Whether a loss has written into the batch, and its part is not done yet."""
        self._whole_only: TaskError | None = None
        """Why it can only be computed at once."""
        self._each_pass: Snapshot | None = None
        """Buffers with which each part begins anew, as they were at first; `None`: nothing has
        begun.
        """
        self._at_first = self._now = Snapshot([])
        """The others: a part goes on with what the one before has made of them."""
        self._gathered = dict[Place, Kept]()
        """Of those that it changes to a mean or a sum of samples: what the parts so far make of
        them.
        """

    def extend(self, first: int, rows: int) -> None:
        """Compute this range of its rows as well, after the others."""
        assert self.ranges is not None  # noqa: S101 - it was made for ranges
        self.ranges.append((first, rows))
        if self._each_pass is not None:
            self.owner.sums.extend(rows)

    @property
    def is_done(self) -> bool:
        """Whether all parts are computed, and only the update is left."""
        return self._each_pass is not None and not self.owner.sums.remaining

    def advance(self, most_rows: int, scale: float = 1.0) -> int:
        """Compute one part of at most so many rows, if one is left; return its rows. `scale`
        multiplies its gradients.

        After an out-of-memory call it again: it goes on where it was.

        Raises:
            TaskError: Parts do not add up.
        """
        owner, sums = self.owner, self.owner.sums
        fits, most_rows = most_rows, min(most_rows, owner.most_rows or most_rows)
        is_cut = most_rows < self.rows or self.ranges is not None
        each_pass = self._each_pass or self._begin(fits, is_cut=is_cut)
        if self._whole_only is not None and is_cut:
            raise self._whole_only
        if sums.is_torn and not owner.repeats:
            self._begin_sums()
        rows, at = sums.next_rows(most_rows), sums.done
        if rows:
            first = self._place(at)
            owner.parts = owner.parts if at else []

            def add() -> None:
                if self._is_spoilt:
                    raise TaskError(
                        "the loss has written into its batch for the first time, and then its part "
                        "was to be computed again, from other numbers; load the batch anew and "
                        "call the step again, which now gives the loss a copy"
                    )
                # Undo what a failed part has changed, and what the part before did once for all.
                each_pass.restore()
                (self._now if at else self._at_first).restore()
                part = self.batch if self.is_whole else part_of(self.batch, first, rows)
                total, weight = self.value(part, first, rows), self.weight
                if weight is not None:
                    items = weight(part)
                    # The mean of no items is not a number, and adds nothing.
                    total = total * items if items else torch.zeros_like(total)
                sums.add(rows, total, scale)

            owner.compute(rows, add)
            if owner.has_looked and self._reaches_further(is_cut=bool(at or self.ranges)):
                # What no batch before has used or changed: of that nothing is known.
                owner.check.forget()
                self.undo()
                return rows
            self._is_spoilt = False
            self._now = Snapshot(self._adding)
            self._gather(each_pass, rows, begins=not at)
            owner.parts.append(rows)
        if not sums.remaining:
            for place, kept in self._passed.items():
                put(place, kept)
        return rows

    def _gather(self, each_pass: Snapshot, rows: int, *, begins: bool) -> None:
        """Take over what a part of so many rows has made of the buffers that it began anew with."""
        changed, kinds = each_pass.changed(), self.owner.buffers
        gathered = self._gathered = {} if begins else self._gathered
        for place, kept in each_pass.saved.items():
            new = changed.get(place, kept)
            if kinds[place] == "mean":
                gathered[place] = gathered.get(place, 0.0) + new * (rows / self.rows)
            elif kinds[place] == "sum":
                gathered[place] = gathered.get(place, kept) + new - kept
        self._passed |= changed | gathered

    def undo(self) -> None:
        """Leave buffers and random numbers as if the batch had not begun."""
        if self._is_drawn and self._random is not None:
            self._random.restore()
        if self._each_pass is not None:
            self._each_pass.restore()
            self._at_first.restore()
            self._each_pass = None

    def changed(self) -> list[Place]:
        """Return the buffers and numbers of the model that its parts so far have changed."""
        kept = () if self._each_pass is None else (self._each_pass, self._at_first)
        return [place for each in kept for place in each.changed()]

    def _reaches_further(self, *, is_cut: bool) -> bool:
        """Whether losses were computed with parameters or operators that no batch before had, or
        have changed a buffer or number that none has; `is_cut`: in more parts than this one.
        """
        owner = self.owner
        # A look may compute in another precision, hence with others than the first batch.
        has_more = 0 < self._operators < len(owner.operators)
        unknown = [place for place in self._at_first.saved if owner.buffers[place] == "unknown"]
        if not is_cut or owner.sums.remaining:
            unknown = []  # a card is waited for with each that is compared: once for all parts
        for place in self._at_first.changed(unknown):
            owner.buffers[place], has_more = "other", True  # if the next look sees it no better
        return has_more or len(owner.sums.used) > self._used

    def value(self, part: Batch, at: int, rows: int) -> Tensor:
        """Return the loss of a part that begins at this row."""
        owner = self.owner
        if self._is_drawn and self._random is not None and not owner.draws:
            self._random.restore()
        self._is_drawn = True
        owner.dropouts.key(self.first + at, rows, owner.sums.loss[0].device)
        # In containers of its own: a loss may take values out of them, and be called again. Tensors
        # of its own are given to one that writes into them, since it would see what it has written.
        writable = owner.checking or owner.writes is not False
        given = own_values(part, tensors=writable)
        before = versions_of(given)
        try:
            value = one_number(self.loss(given))
        finally:
            changed = before != versions_of(given)
            owner.writes = bool(owner.writes) or changed
            self._is_spoilt |= changed and not writable
        if owner.has_looked and not owner.checking:
            owner.operators |= operators_of(value)
        return value

    def value_of(self, part: Batch, at: int) -> Tensor:
        """Return the same of a part whose samples can be told."""
        return self.value(part, at, rows_of(part))

    def _begin(self, most_rows: int, *, is_cut: bool) -> Snapshot:
        owner = self.owner
        owner.hold()
        if not self.is_whole:
            self._whole_only = owner.look_at(self, most_rows, is_cut=is_cut)
        self._begin_sums()
        self._used, self._operators = len(owner.sums.used), len(owner.operators)
        others = "other", "unknown"
        self._adding = [place for place, kind in owner.buffers.items() if kind in others]
        self._passed = dict[Place, Kept]()
        self._at_first = self._now = Snapshot(self._adding)
        self._each_pass = Snapshot(owner.buffers.keys() - self._adding)
        return self._each_pass

    def _begin_sums(self) -> None:
        sums, ranges = self.owner.sums, self.ranges
        sums.begin(self.rows if ranges is None else 0, self.items)
        for _, rows in ranges or ():
            sums.extend(rows)

    def _place(self, at: int) -> int:
        """Return the row of the batch that comes after so many that are computed here."""
        for first, rows in self.ranges or ():
            if at < rows:
                return first + at
            at -= rows
        return at


class LoopBatches(BatchInParts):
    """The sums of one model, and the size of its parts."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        seed: int,
        rules: Callable[..., RetryRules],
        on_hazard: Callable[[str], None] | None,
        counted: str = "count",
    ) -> None:
        """Allocate what outlives a step: sums of gradients, and the states of an Adam.

        Args:
            model: On its device. Its `nn.Dropout` modules become keyed by seed and sample.
            optimizers: What their groups hold is trained, as far as it wants a gradient.
            seed: For dropout.
            rules: Makes the rules of attempts from a `starting_batch_size`.
            on_hazard: Told once of each hazard that a user may accept; `None`: they are refused.
            counted: What tells the loss the items of the whole batch, for messages.
        """
        self._optimizers, self._rules, self._on_hazard = optimizers, rules, on_hazard
        self._attempts: Attempts | None = None
        look = Look(
            accepts=self._accepted,
            tell=on_hazard or (lambda _: None),
            counted=counted,
            may_fail=True,
        )
        super().__init__(model, seed, Accumulator([]), look)
        self.hold()

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
        """Add up loss and gradient of a batch, and return what `finish` makes of them.

        Args:
            batch: One whose samples cannot be told is computed at once.
            loss: From a part to the mean of its samples; with `count` to the sum of its items.
            finish: Called after the last part; if it runs out of memory, once more.
            first: The number of the batch's first sample, by which dropout is keyed.
            count: Items of the whole batch.
            scale: By which gradients are multiplied.
            share: By which a mean is multiplied, where the batch is one of several of an update.
            weight: Of how many samples, or items, the mean of a part is.

        Raises:
            TaskError: Parts do not add up, or the batch does not fit at once and cannot be cut.
            OutOfBatchError: One sample at a time did not fit as long as the rules wait.
        """
        uncut: TaskError | None = None
        if any(each.requires_grad and not each.is_leaf for each in tensors_in(batch)):
            raise TaskError(
                "the batch was computed from what is trained, and each part would need that again; "
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
                # A check and the part after it are one attempt: what is learned is the larger peak.
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

    def hold(self) -> None:
        """Have sums and states for what is trained now. Where that is new, look at all anew.

        Raises:
            TaskError: A hook asks for what no part has.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        wanted = {each: None for group in groups for each in group["params"] if each.requires_grad}
        if any(map(_is_hooked_late, wanted)):
            raise TaskError(
                "a parameter has a hook of register_post_accumulate_grad_hook or "
                "register_multi_grad_hook, which would see no gradient; remove it, and do its work "
                "after the step"
            )
        if isinstance(self.model, DistributedDataParallel) or any(map(is_lazy, wanted)):
            raise TaskError(
                "the model is DistributedDataParallel, whose gradients are exchanged by backward(), "
                "or lazy; hand over the model itself, after it was called once"
            )
        if self.sums.holds(list(wanted)) and self.modules == list(self.model.modules()):
            return
        for optimizer in self._optimizers:
            allocate_states(optimizer)
        self.sums.hold(list(wanted))
        self.look_anew()

    def _accepted(self, found: Sequence[PartsError]) -> Mapping[str, str]:
        """Return what a user may accept, and can.

        Raises:
            PartsError: No user can accept it, or none does.
        """
        if found and (self._on_hazard is None or found[0].cause == "unknown"):
            raise found[0]
        return {each.cause: str(each) for each in found}
