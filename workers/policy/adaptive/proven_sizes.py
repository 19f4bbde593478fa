"""Sizes that have ended well lately, and under how much memory: what still runs when no failure can
be afforded.

Keeps one of each neighbourhood, so that a smaller one is known when memory falls. Does not know
what a step takes (`footprint.py`), and probes nothing (`size_bounds.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: A proof counts for so long, and is renewed by a step that comes so much later.
_LASTS_S: Final = 600.0
_RENEWED_S: Final = 5.0

#: Of sizes whose ratio is smaller, the last one is kept.
_APART: Final = 1.5

#: A failure says the same of sizes down to this share of the one that failed.
_REFUTED: Final = 0.8

#: Memory that differs by no more is the same: samples are noisy.
_ALIKE: Final = 0.95


class Proof(NamedTuple):
    """A size that ended well under so much memory."""

    size: int
    memory_bytes: float
    """0 where no signal told how much there was."""
    at_s: float


Proofs = tuple[Proof, ...]


def proven(proofs: Proofs, new: Proof) -> Proofs:
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


def refuted(proofs: Proofs, size: int, memory_bytes: float) -> Proofs:
    """Return the proofs that remain after a failure of this size under so much memory."""
    return tuple(
        proof
        for proof in proofs
        if proof.size < _REFUTED * size or _ALIKE * proof.memory_bytes > memory_bytes
    )


def largest_proven(proofs: Proofs, memory_bytes: float, at_s: float) -> int | None:
    """Return the largest size that has ended well lately under no more memory.

    `None` if there is none.
    """
    fit = (
        proof.size
        for proof in proofs
        if _ALIKE * proof.memory_bytes <= memory_bytes and at_s < proof.at_s + _LASTS_S
    )
    return max(fit, default=None)
