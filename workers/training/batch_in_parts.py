"""The gradient of one batch after the other, each added up over the parts that fit in memory.

What `ElasticStep` and `ElasticMixin` share: they choose parts, try again after an out-of-memory,
refuse what would not add up, and give each part the random numbers and buffers that one pass over
the whole batch would have. Weights are not updated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from workers import oom
from workers.resilience.attempts import Attempts, OutOfBatchError, RetryRules
from workers.settings import FailureKind
from workers.training.accumulator import Accumulator, operators_of
from workers.training.batches import Batch, map_tensors, part_of, rows_of, tensors_in
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts
from workers.training.optimizers import allocate_states
from workers.training.parts import (
    Kept,
    PartsError,
    Place,
    RandomState,
    Snapshot,
    check_parts,
    one_number,
    places_of,
    put,
)
from workers.training.unevenness import PartsCheck

R = TypeVar("R")

#: Where modules say how much they drop.
_OF_DROPOUT: Final = "p", "dropout", "dropout_p"


class BatchInParts:
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
        self.model, self._optimizers, self._seed = model, optimizers, seed
        self._rules, self._on_hazard, self._counted = rules, on_hazard, counted
        self.sums = Accumulator([])
        self._attempts: Attempts | None = None
        self._most_tried = 0
        self.parts: list[int] = []
        """Rows of each part of the last batch."""
        self.most_rows: int | None = None
        """Of a part, at most; `None`: as many as fit."""
        self.checking = False
        """Whether a loss is asked for to see that parts add up, and not to train."""
        self._look_anew()
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
        if self._attempts is None or rows > self._most_tried:
            self._attempts = Attempts(self._rules(starting_batch_size=rows))
            self._most_tried = rows
        items = rows / share if count is None else count or rows
        one = _OneBatch(
            self, batch, rows, loss, finish, first, items, scale, is_mean=count is None, uncut=uncut
        )
        done: list[R] = []
        try:
            while not done:
                # A check and the part after it are one attempt: what is learned is the larger peak.
                done = self._attempts.run(one.advance)
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
        if any(each._post_accumulate_grad_hooks for each in wanted):
            raise TaskError(
                "a parameter has a hook of register_post_accumulate_grad_hook, which would see no "
                "gradient; remove it, and do its work after the step"
            )
        if isinstance(self.model, DistributedDataParallel) or any(map(is_lazy, wanted)):
            raise TaskError(
                "the model is DistributedDataParallel, whose gradients are exchanged by backward(), "
                "or lazy; hand over the model itself, after it was called once"
            )
        if self.sums.holds(list(wanted)) and self._modules == list(self.model.modules()):
            return
        for optimizer in self._optimizers:
            allocate_states(optimizer)
        self.sums.hold(list(wanted))
        self._look_anew()

    def _look_anew(self) -> None:
        """Know nothing of the model: neither its dropouts nor what its passes change."""
        self.dropouts, self.check = Dropouts(self.model, self._seed), PartsCheck()
        self._modules = list(self.model.modules())
        #: Of the buffers that passes change whether each does so once, whatever its samples are.
        self._changing = dict.fromkeys(places_of(self._modules, small=True), False)
        self.buffers: tuple[list[Place], list[Place]] = [], list(self._changing)
        """Those that a pass changes once, and those to which it may add something of each sample.
        """
        self.draws = False
        """Whether a user accepts that samples draw from torch's own random numbers."""
        self.writes: bool | None = None
        """Whether a loss writes into its batch; `None`: none has been computed."""
        self.operators = set[str]()
        """With which losses were computed, by name."""
        self.repeats = True
        """Whether samples that are computed again, or in other parts, have the same gradients."""

    def is_due(self, batch: Batch, rows: int, *others: object) -> bool:
        """Whether no batch of this form was checked, of this model in this mode."""
        modes = [
            (
                each.training,
                *(p for name in _OF_DROPOUT if isinstance(p := vars(each).get(name), float)),
            )
            for each in self._modules
        ]
        return self.check.due(batch, rows, *modes, *others)

    def refuse(
        self,
        batch: Batch,
        value: Callable[[Batch, int, int], Tensor],
        most_rows: int,
        *,
        is_mean: bool,
        is_cut: bool,
    ) -> TaskError | None:
        """Refuse a batch whose parts do not add up; return why one cannot be cut that need not be.

        Raises:
            PartsError: They do not, and no user can accept it, or none does.
            TaskError: The batch must be cut, and cannot be.
        """
        found: list[PartsError] | None = []
        self.checking = True
        try:
            found = check_parts(
                self.model,
                batch,
                lambda part, at: value(part, at, rows_of(part)),
                weight=rows_of if is_mean else None,
                counted=self._counted,
                rows=most_rows,
                accumulator=self.sums,
                buffers=self._changing,
            )
        except TaskError as error:
            if is_cut or isinstance(error, PartsError):
                raise
            return error
        except Exception as error:
            if oom.classify(error).kind is not FailureKind.OTHER:
                raise
            said = " ".join(str(error).split())
            uncut = TaskError(
                f"the loss fails with some of the {rows_of(batch)} samples "
                f"({type(error).__name__}: {said}); leave out of the batch what belongs to all "
                "samples alike and only happens to have as many rows, such as weights of classes, "
                "and keep no state of a size that follows the batch"
            )
            if is_cut:
                raise uncut from error
            return uncut  # the batch is computed at once, and fails there or not at all
        finally:
            self.checking = False
        once = [place for place, is_once in self._changing.items() if is_once]
        self.buffers = once, [place for place in self._changing if not self._changing[place]]
        if found is None:  # the next batch may tell more
            return None
        if found and (self._on_hazard is None or found[0].cause == "unknown"):
            raise found[0]
        self.draws = any(each.cause == "dropout" for each in found)
        self.repeats &= not found
        for sentence in self.check.done({each.cause: str(each) for each in found}):
            if self._on_hazard is not None:
                self._on_hazard(sentence)
        return None


@dataclass
class _OneBatch(Generic[R]):
    """A batch under way. Each part begins with the random numbers and buffers with which the batch
    began, so that all parts together do what one pass would.
    """

    owner: BatchInParts
    batch: Batch
    rows: int
    loss: Callable[[Batch], object]
    finish: Callable[[], R]
    first: int
    items: float
    scale: float
    is_mean: bool
    uncut: TaskError | None
    """Why it cannot be cut."""

    def __post_init__(self) -> None:
        self._random = RandomState(self.owner.sums.loss[0].device)
        self._is_drawn = False
        """Whether a part may have drawn random numbers since."""
        self._whole_only: TaskError | None = None
        """Why it can only be computed at once."""
        self._each_pass: Snapshot | None = None
        """Buffers that a pass changes once, as they were at first; `None`: nothing has begun."""
        self._at_first = self._now = Snapshot([])
        """Those to which it adds something of each sample."""

    def advance(self, most_rows: int) -> list[R]:
        """Compute one part of at most so many rows; after the last one return what comes of it."""
        owner, sums = self.owner, self.owner.sums
        fits, most_rows = most_rows, min(most_rows, owner.most_rows or most_rows)
        each_pass = self._each_pass or self._begin(fits, is_cut=most_rows < self.rows)
        if self._whole_only is not None and most_rows < self.rows:
            raise self._whole_only
        if sums.is_torn and not owner.repeats:
            sums.begin(self.rows, self.items)
        if rows := sums.next_rows(most_rows):
            at = sums.done
            owner.parts = owner.parts if at else []
            # Undo what a failed part has changed, and what the part before did once for all.
            each_pass.restore()
            (self._now if at else self._at_first).restore()
            part = self.batch if self.uncut else part_of(self.batch, at, rows)
            total = self._value(part, at, rows) * (rows if self.is_mean else 1)
            sums.add(rows, total, self.scale)
            if self._reach() > self._reached:  # of that nothing is known
                owner.check.forget()
                self.undo()
                return []
            del total  # the update needs its memory
            self._now = Snapshot(self._adding)
            self._passed |= each_pass.changed()
            owner.parts.append(rows)
        if sums.remaining:
            return []
        for place, kept in self._passed.items():
            put(place, kept)
        return [self.finish()]

    def undo(self) -> None:
        """Leave buffers and random numbers as if the batch had not begun."""
        if self._is_drawn:
            self._random.restore()
        if self._each_pass is not None:
            self._each_pass.restore()
            self._at_first.restore()
            self._each_pass = None

    def _begin(self, most_rows: int, *, is_cut: bool) -> Snapshot:
        owner = self.owner
        owner.hold()
        code = getattr(self.loss, "__code__", type(self.loss))
        if (
            self.uncut is None
            and min(most_rows, self.rows) > 1
            and owner.is_due(self.batch, self.rows, self.is_mean, code)
        ):
            self._whole_only = owner.refuse(
                self.batch, self._value, most_rows, is_mean=self.is_mean, is_cut=is_cut
            )
        owner.sums.begin(self.rows, self.items)
        self._reached = self._reach()
        once, self._adding = owner.buffers
        self._passed = dict[Place, Kept]()
        self._at_first = self._now = Snapshot(self._adding)
        self._each_pass = Snapshot(once)
        return self._each_pass

    def _reach(self) -> int:
        """Return how many parameters and operators losses were computed with until now."""
        return len(self.owner.sums.used) + len(self.owner.operators)

    def _value(self, part: Batch, at: int, rows: int) -> Tensor:
        if self._is_drawn and not self.owner.draws:
            self._random.restore()
        self._is_drawn = True
        self.owner.dropouts.key(self.first + at, rows, self.owner.sums.loss[0].device)
        # In containers of its own: a loss may take values out of them, and be called again. Tensors
        # of its own are given to one that writes into them, since it would see what it has written.
        owner = self.owner
        writable = owner.checking or owner.writes is not False
        given = map_tensors(
            lambda each: each.clone() if writable and isinstance(each, Tensor) else each, part
        )
        before = [each._version for each in tensors_in(given)]
        value = one_number(self.loss(given))
        changed = before != [each._version for each in tensors_in(given)]
        owner.writes = bool(owner.writes) or changed
        self.owner.operators |= operators_of(value)
        return value
