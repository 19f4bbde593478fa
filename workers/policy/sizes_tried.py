"""Sizes tried: what experience allows. Nothing as large as what failed lately, and what still runs
when no failure can be afforded.

`Bracket` bisects between the largest good size and the smallest bad one. After a bad size is
forgotten, it grows in increasing steps. Probes above the largest good size may fail, so their
number is limited. It uses neither needed nor free memory: without a free-memory signal this is the
only bound, and it holds also when the signal is wrong.

`Proofs` are sizes that have ended well lately, and under how much memory: one of each
neighbourhood, so that a smaller one is known when memory falls.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, NamedTuple

from workers.policy.memory_seen import MINUTE_S

#: Share of a good size that is kept after it fails, by the number of failures in a row. Each
#: further failure is costly, so the share falls fast.
KEPT_AFTER: Final = (0.8, 0.6, 0.45, 0.3, 0.15)

#: The same before any step has ended well: a step that is too small costs next to nothing then, as
#: growth follows.
_KEPT_COLD: Final = (0.8, 0.4, 0.25, 0.1)

#: A known-bad size is forgotten after so long.
FORGET_S: Final = 20.0

#: A gap between a good and a bad size that is this share of the good one is not worth a failure.
WORTH_TRYING: Final = 0.03

#: The first probe beyond a forgotten limit is this share larger, each next one so much bolder, at
#: most doubling.
FIRST_PROBE: Final = 0.06
GALLOP: Final = 1.8

#: Probes that may fail: one for so long, saved up to a few. The farther the size is below the
#: largest that has ended well in the last five minutes, the more a probe may win: far below, there
#: is one more for each time that a bad size is remembered.
PROBE_EVERY_S: Final = 75.0
_PROBES_SAVED: Final = 3.0

#: A proof is renewed by a step that comes so much later; it counts for ten minutes.
_RENEWED_S: Final = 5.0

#: Of sizes whose ratio is smaller, the last one is proven.
_APART: Final = 1.5

#: Memory that differs by no more is the same: samples are noisy.
_ALIKE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The sizes that are possible, from the smallest to the largest, in steps or on given rungs.

    Raises:
        ValueError: There are none.
    """

    largest: int
    smallest: int = 1
    quantum: int = 1
    """Sizes are multiples of this; `smallest` and `largest` themselves are always allowed."""
    rungs: tuple[int, ...] = ()
    """The only sizes there are, ascending, from `smallest` to `largest`; empty for all multiples of
    `quantum`.
    """
    first: int | None = None
    """Where a workload that was never measured begins; `None` for a small share of `largest`."""
    power: float = 1.0
    """Memory grows with size^power."""
    worth_growing: float = 0.01
    """A size grows only by this share or more, because a change has a cost."""
    failures_per_minute: int = 6
    """Never more within any 60 s."""
    exact_samples: bool = False
    """Whether samples of free memory are true to the byte when they are taken; else they are
    smoothed.
    """
    smallest_step: str = "the smallest step"
    """In words for a user, to whom a size in the units of a policy says nothing."""

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(
                f"sizes must be 1 <= smallest <= largest, not {self.smallest} and {self.largest}"
            )
        for name in ("quantum", "failures_per_minute"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.power <= 0:
            raise ValueError(f"power must be above 0, not {self.power}")

    def down(self, size: float) -> int:
        """Return the largest size there is that is no larger; `smallest` at least."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[max(0, bisect_right(self.rungs, size) - 1)]
        return max(self.smallest, int(size) // self.quantum * self.quantum)

    def up(self, size: int) -> int:
        """Return the next larger size there is; `largest` at most."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[bisect_right(self.rungs, size)]
        return min(self.largest, (size // self.quantum + 1) * self.quantum)


class Bracket(NamedTuple):
    """What was good and what was bad; an immutable value, changed with `_replace`."""

    good: int | None = None
    """The size of the last step that ended well, or what is hoped for after that failed."""
    bad: int | None = None
    """The smallest size that failed lately."""
    bad_until_s: float = 0.0
    gallop: float = 1.0
    """The next probe beyond all that is known is this share larger."""
    probes: float = _PROBES_SAVED
    """Probes that may still fail, as of `probes_at_s`."""
    probes_at_s: float = 0.0
    best: float = 0.0
    """The largest size that has ended well lately; fades."""
    in_row: int = 0
    """Failures since a step ended well."""
    taken: bool = False
    """Whether these began at a size that had ended well: memory was taken, and nothing was probed.
    """
    untried: bool = False
    """Whether `good` is only remembered from an earlier run."""

    def may_probe(self, now_s: float) -> bool:
        """Whether a failure above what is known to be good can be afforded."""
        return self._saved(now_s) >= 1.0

    def allowed(self, good: int, bounds: Bounds, now_s: float, *, promised: bool) -> int:
        """Return the largest size to try now; `good` is `self.good`, which must be known.

        `promised`: something else bounds the size from above. Then what is not forbidden is
        allowed, and between good and bad it is no probe that must be earned.
        """
        size, may_fail = good, promised or self.may_probe(now_s)
        if self.in_row or self.untried:
            pass
        elif self.bad is None or now_s >= self.bad_until_s:
            if promised:
                size = bounds.largest
            elif may_fail:
                size = max(bounds.up(good), bounds.down(good * (1.0 + self.gallop)))
        elif good >= self.bad:
            size = bounds.down(self.bad - 1)
        elif self.bad - good > WORTH_TRYING * good and may_fail:
            half = max(bounds.up(good), bounds.down((good * self.bad) ** 0.5))
            size = min(bounds.down(self.bad - 1), half)
        return size

    def ended_well(self, size: int, now_s: float) -> Bracket:
        """Return the bracket after a step that ended well."""
        if size == self.good and self.bad is None and not (self.in_row or self.untried):
            return self
        over = self.bad is not None and (size >= self.bad or now_s >= self.bad_until_s)
        bad, gallop = None if over else self.bad, self.gallop
        if bad is None and (self.good is None or size > self.good):
            gallop = min(1.0, gallop * GALLOP)
        return self._replace(
            good=size,
            bad=bad,
            gallop=gallop,
            probes=self._saved(now_s),
            probes_at_s=now_s,
            best=max(size, self.best * max(0.0, 1.0 - (now_s - self.probes_at_s) / (5 * MINUTE_S))),
            in_row=0,
            untried=False,
        )

    def ran_out(self, bounds: Bounds, size: int, now_s: float, *, cold: bool = False) -> Bracket:
        """Return the bracket after a step that ran out of memory.

        `cold`: before any has ended well.
        """
        probe = self.good is not None and size > self.good and self.in_row == 0
        taken = (
            self.taken
            if self.in_row
            else self.good is not None and size <= self.good and not self.untried
        )
        free = taken and (
            self.bad is None or self.in_row > 0
        )  # it had not climbed back towards a size that failed
        shares = _KEPT_COLD if cold else KEPT_AFTER
        kept = shares[min(self.in_row, len(shares) - 1)]
        return Bracket(
            good=self.good if probe else bounds.down(min(size * kept, size - 1)),
            bad=size,
            bad_until_s=now_s + FORGET_S,
            gallop=FIRST_PROBE,
            probes=max(0.0, min(_PROBES_SAVED, self._saved(now_s)) - (not free)),
            probes_at_s=now_s,
            best=self.best,
            in_row=self.in_row + 1,
            taken=taken,
        )

    def forgiven(self) -> Bracket:
        """Return the bracket without its bad size: memory was taken, the size itself is not to
        blame.
        """
        return self._replace(bad=None, untried=False)

    def _saved(self, now_s: float) -> float:
        below = max(0.0, 1.0 - (self.good or 0) / self.best) if self.best else 0.0
        return self.probes + max(0.0, now_s - self.probes_at_s) * (
            1 / PROBE_EVERY_S + below / FORGET_S
        )


class Proof(NamedTuple):
    """A size that ended well under so much memory."""

    size: int
    memory_bytes: float
    """0 where no signal told how much there was."""
    at_s: float


Proofs = tuple[Proof, ...]


def with_proof(proofs: Proofs, new: Proof) -> Proofs:
    """Return the proofs with a new one, which replaces those of sizes near to it."""
    for old in proofs:
        if (
            old.size == new.size
            and old.memory_bytes <= new.memory_bytes
            and new.at_s < old.at_s + _RENEWED_S
        ):
            return proofs
    kept = (old for old in proofs if not new.size / _APART < old.size < new.size * _APART)
    return (*kept, new)


def without_refuted(proofs: Proofs, size: int, memory_bytes: float) -> Proofs:
    """Return the proofs that remain after a failure of this size under so much memory.

    It says the same of sizes down to the share that is kept after it.
    """
    return tuple(
        proof
        for proof in proofs
        if proof.size < KEPT_AFTER[0] * size or _ALIKE * proof.memory_bytes > memory_bytes
    )


def largest_proven(proofs: Proofs, memory_bytes: float, at_s: float) -> int | None:
    """Return the largest size that has ended well lately under no more memory.

    `None` if there is none.
    """
    fit = (
        proof.size
        for proof in proofs
        if _ALIKE * proof.memory_bytes <= memory_bytes and at_s < proof.at_s + 10 * MINUTE_S
    )
    return max(fit, default=None)
