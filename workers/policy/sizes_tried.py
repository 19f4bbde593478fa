"""Sizes tried: which sizes the recent successes and failures allow.

`Bracket` bisects between the last good size and the size that failed last. When a bad size has expired,
the bracket grows in increasing steps. The number of probes above the good size is limited, because
they may fail. The bracket uses neither needed nor free memory: without a memory signal it is the
only bound, and it also holds when the signal is wrong.

`Proofs` are sizes that succeeded lately, each with the memory there was: one for each range of
sizes, so that a smaller one is known when memory falls or no failure is allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, NamedTuple

from workers.policy.memory_seen import MINUTE_S

#: Share of a size that is kept after it fails, by the number of failures in a row. The share falls
#: fast because each further failure is costly.
KEPT_AFTER: Final = (0.8, 0.6, 0.45, 0.3, 0.15)

#: As `KEPT_AFTER`, before any step has succeeded: a step that is too small costs little then,
#: because growth follows.
_KEPT_COLD: Final = (0.8, 0.4, 0.25, 0.1)

#: Time after which a bad size expires.
FORGET_S: Final = 20.0

#: If the gap between the good and the bad size is a smaller share of the good one, the bracket does
#: not probe in it.
WORTH_TRYING: Final = 0.03

#: The first probe after a bad size has expired is larger than the good size by the share
#: `FIRST_PROBE`. This share grows by the factor `GALLOP` with each larger success, up to 1.
FIRST_PROBE: Final = 0.06
GALLOP: Final = 1.8

#: One failing probe is allowed in this time, and a few unused ones are saved. Far below the largest
#: size that succeeded in the last five minutes a probe can win more: there up to one more is
#: allowed in each `FORGET_S`.
PROBE_EVERY_S: Final = 75.0
_PROBES_SAVED: Final = 3.0

#: A success of the same size renews a proof only after this time; a proof is valid for ten minutes.
_RENEWED_S: Final = 5.0

#: A new proof replaces the proofs of all sizes within this factor.
_APART: Final = 1.5

#: Amounts of memory whose ratio is at least this count as equal: samples are noisy.
_ALIKE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The allowed sizes, from smallest to largest: multiples of a quantum, or given rungs.

    Raises:
        ValueError: A bound is out of range.
    """

    largest: int
    smallest: int = 1
    quantum: int = 1
    """Sizes are multiples of this; `smallest` and `largest` themselves are always allowed."""
    rungs: tuple[int, ...] = ()
    """All allowed sizes, ascending, from `smallest` to `largest`; empty: all multiples of
    `quantum`.
    """
    first: int | None = None
    """First size of a workload that was never measured; `None`: a small share of `largest`."""
    power: float = 1.0
    """Memory grows with size^power."""
    worth_growing: float = 0.01
    """Smallest share by which a size grows, because each change has a cost."""
    failures_per_minute: int = 6
    """Most failures within any 60 s."""
    exact_samples: bool = False
    """Whether samples of free memory are exact to the byte; else they are smoothed."""
    smallest_step: str = "the smallest step"
    """Name of the smallest step in messages, because a user does not know the units of a policy."""

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
        """Return the largest allowed size up to `size`; at least `smallest`."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[max(0, bisect_right(self.rungs, size) - 1)]
        return max(self.smallest, int(size) // self.quantum * self.quantum)

    def up(self, size: int) -> int:
        """Return the next larger allowed size; at most `largest`."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[bisect_right(self.rungs, size)]
        return min(self.largest, (size // self.quantum + 1) * self.quantum)


class Bracket(NamedTuple):
    """The good and the bad size so far; an immutable value, changed with `_replace`."""

    good: int | None = None
    """Size of the last successful step or, after it failed, the size to try next."""
    bad: int | None = None
    """Size that failed last, until it expires."""
    bad_until_s: float = 0.0
    gallop: float = 1.0
    """The next probe is larger than `good` by this share."""
    probes: float = _PROBES_SAVED
    """Failing probes still allowed, as of `probes_at_s`."""
    probes_at_s: float = 0.0
    best: float = 0.0
    """The largest recently successful size; decays over five minutes."""
    in_row: int = 0
    """Failures since the last success."""
    taken: bool = False
    """Whether the failures in a row began at a size that had succeeded: then memory was taken, and
    the first failure was not a probe.
    """
    untried: bool = False
    """Whether `good` comes from an earlier run and was not tried in this one."""

    def may_probe(self, now_s: float) -> bool:
        """Return whether a failing probe is allowed now."""
        return self._saved(now_s) >= 1.0

    def allowed(self, good: int, bounds: Bounds, now_s: float, *, promised: bool) -> int:
        """Return the largest size to try now; `good` is `self.good`, which must not be `None`.

        `promised`: the memory signal bounds the size as well. Then all sizes are allowed once the
        bad size has expired, and bisection between good and bad needs no saved probe.
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

    def after_success(self, size: int, now_s: float) -> Bracket:
        """Return the bracket after a successful step."""
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

    def after_oom(self, bounds: Bounds, size: int, now_s: float, *, cold: bool = False) -> Bracket:
        """Return the bracket after a step that ran out of memory.

        `cold`: no step has succeeded yet.
        """
        probe = self.good is not None and size > self.good and self.in_row == 0
        taken = (
            self.taken
            if self.in_row
            else self.good is not None and size <= self.good and not self.untried
        )
        free = taken and (
            self.bad is None or self.in_row > 0
        )  # costs no probe: it was not growing back towards a bad size
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

    def without_bad(self) -> Bracket:
        """Return the bracket without its bad size, after another cause explained the failure."""
        return self._replace(bad=None, untried=False)

    def _saved(self, now_s: float) -> float:
        below = max(0.0, 1.0 - (self.good or 0) / self.best) if self.best else 0.0
        return self.probes + max(0.0, now_s - self.probes_at_s) * (
            1 / PROBE_EVERY_S + below / FORGET_S
        )


class Proof(NamedTuple):
    """A size that succeeded, and the memory that there was."""

    size: int
    memory_bytes: float
    """0 if there was no memory signal."""
    at_s: float


Proofs = tuple[Proof, ...]


def with_proof(proofs: Proofs, new: Proof) -> Proofs:
    """Return the proofs with a new one, which replaces the proofs of similar sizes."""
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
    """Return the proofs that remain valid after `size` failed with `memory_bytes`.

    The failure also refutes smaller sizes, down to the share that is kept after a failure.
    """
    return tuple(
        proof
        for proof in proofs
        if proof.size < KEPT_AFTER[0] * size or _ALIKE * proof.memory_bytes > memory_bytes
    )


def largest_proven(proofs: Proofs, memory_bytes: float, at_s: float) -> int | None:
    """Return the largest size that succeeded lately with at most `memory_bytes`.

    `None` if there is none.
    """
    fit = (
        proof.size
        for proof in proofs
        if _ALIKE * proof.memory_bytes <= memory_bytes and at_s < proof.at_s + 10 * MINUTE_S
    )
    return max(fit, default=None)
