"""What a tuning says of one lever: the row that is shown, stored, and read by `advise`.

Holds values only. How they are computed is in `statistics.py` and `verdicts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a measurement says of "this lever helps"."""

    CONFIRMED = "CONFIRMED"
    NO_EFFECT = "NO EFFECT"
    """The whole interval lies within the resolution around 1.0."""
    REFUTED = "REFUTED"
    """The other direction."""
    BROKEN = "BROKEN"
    """It changes the result of the training more than its parity class allows."""
    UNAVAILABLE = "UNAVAILABLE"
    """This machine or this version cannot run it."""
    UNDECIDED = "UNDECIDED"
    """The budget ended before the interval was narrow enough, or the arm did not live long enough.
    """


class ParityClass(StrEnum):
    """How much of the training's result a lever may change."""

    EXACT = "exact"
    """No bit, or 1e-6 of the loss."""
    NUMERIC = "numeric"
    """A tenth of what another seed changes."""
    OBJECTIVE = "objective"
    """It changes what is trained; validation losses are compared instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One lever at one setting.

    Its fields are the keys of `tune --json`; `None` means not known.
    """

    lever: str
    """The key of `train:` or `workload:`; of several keys, joined by ` + `."""
    setting: str
    speed_ratio: float | None = None
    """Samples per second divided by the baseline's of the same round, the median over rounds."""
    speed_low: float | None = None
    speed_high: float | None = None
    """With `speed_low` the interval of `speed_ratio`, simultaneous over all rows of a table."""
    peak_bytes: int | None = None
    """The highest use of the device by tensors in the first steps."""
    parity_class: str | None = None
    """A value of `ParityClass`."""
    loss_gap_noise: float | None = None
    """The gap to the baseline's loss, as a multiple of what another seed changes."""
    verdict: Verdict
    reason: str
    samples_per_s: float | None = None
    """Optimised samples, or tokens where lengths differ; the median over rounds. Of matmul not
    given.
    """
    tflops: float | None = None
    """Operations of the model, without what is repeated, in 10^12 a second."""
    mfu_pct: float | None = None
    """Those, of what the card is rated for in this number type at its clock."""
    peak_delta_bytes: int | None = None
    """`peak_bytes` less the baseline's."""
    host_bytes: int | None = None
    """Resident memory of the process."""
    host_delta_bytes: int | None = None
    once_s: float | None = None
    """What the first step took beyond another one, such as a compilation."""
    pays_after_s: float | None = None
    """When it has done as much as the baseline, which began sooner; `None` while it is not known to
    be faster.
    """

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**asdict(self), "verdict": self.verdict.value}


def row_from(plain: Mapping[str, Any]) -> Row:
    """Return the row that `Row.plain` wrote.

    Raises:
        TypeError: A key is missing or unknown.
        ValueError: The verdict is none.
        KeyError: There is no verdict.
    """
    return Row(**{**plain, "verdict": Verdict(plain["verdict"])})
