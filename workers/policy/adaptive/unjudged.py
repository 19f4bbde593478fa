"""Failures that no sample has come after yet: the next one explains them, because memory was taken,
or does not.

Keeps what was known before them, which holds again if it does. Judges nothing itself (`sizer.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from workers.policy.adaptive.heavy_steps import HeavySteps
from workers.policy.adaptive.proven_sizes import Proofs


class Unjudged(NamedTuple):
    """One failure or more since the last sample."""

    needed_bytes: float
    """The least that one of these steps should have taken."""
    heavy: HeavySteps
    """What was known of heavy steps before the first."""
    proofs: Proofs
    """What had ended well before the first that was no heavy step."""
    surprising: bool
    """Whether one of them was no heavy step: what the last sample said is no longer so."""

    def heavy_if_taken(self, now: HeavySteps) -> HeavySteps:
        """Return what is known of heavy steps if memory was taken.

        `now` is what is known if it was not.
        """
        before = self.heavy
        return (
            now._replace(ratio=before.ratio)
            if before.confirmed
            else before._replace(ordinary=now.ordinary)
        )


def and_failure(
    unjudged: Unjudged | None,
    needed_bytes: float,
    heavy: HeavySteps,
    proofs: Proofs,
    *,
    surprising: bool,
) -> Unjudged:
    """Return the failures with one more, of a step that should have taken `needed_bytes`."""
    if unjudged is None:
        before = heavy if heavy.confirmed else heavy.passed(failed=True)
        return Unjudged(
            needed_bytes=needed_bytes, heavy=before, proofs=proofs, surprising=surprising
        )
    return Unjudged(
        needed_bytes=min(unjudged.needed_bytes, needed_bytes),
        heavy=unjudged.heavy,
        proofs=unjudged.proofs if unjudged.surprising else proofs,
        surprising=unjudged.surprising or surprising,
    )
