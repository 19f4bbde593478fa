"""One lever at one setting: what is tried, what was measured, and what that is called. Pure.

Each round gives one ratio of speeds: a turn of the lever against the turn of the baseline beside
it. Who begins changes with each round (A B B A ...), so that a machine that becomes slower favours
neither. Does not measure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import accumulate
from statistics import median
from typing import Any, Final

from orchestrator.config.schema import TuneConfig
from workers.tuning.messages import Opened

#: Of the losses, relative: for levers that add in another order and change nothing else.
EXACT_GAP: Final = 1e-6
#: For levers that compute in another arithmetic. Measured in a small training over 100 steps: bf16
#: against fp32 differs by 2.5e-4, 8-bit AdamW by 5.9e-4, and another seed by 1.8e-2.
NUMERIC_GAP: Final = 5e-3

#: Of the doubt that the user allows (0.05 where the confidence is 0.95): a first look at the rounds
#: may be wrong with this share of it, and the last with the rest. So both together keep to it.
_FIRST_LOOK: Final = 0.2

#: Peaks of equal arms differ by up to 5 % on a CPU (measured), and by nothing on a card.
_SAME_BYTES: Final = 0.05


class LeverVerdict(StrEnum):
    """What a measurement says of a lever."""

    FASTER = "FASTER"
    """The whole interval is above 1.0 by more than `tune.resolve`: of five tunings in which nothing
    changed, two had an interval that began at 1.006 and 1.010 (measured beside other programs).
    """
    LESS_MEMORY = "LESS MEMORY"
    """Its peak is at least 5 % lower. It may be slower: the interval says by how much."""
    NO_DIFFERENCE = "NO DIFFERENCE"
    """The whole interval is within `tune.resolve` of 1.0."""
    SLOWER = "SLOWER"
    TOO_FEW_ROUNDS = "TOO FEW ROUNDS"
    """There is no interval yet, or it is too wide to tell."""
    BROKEN = "BROKEN"
    """It changes the losses of the training more than its parity class allows."""
    UNAVAILABLE = "UNAVAILABLE"
    """This machine or this version cannot run it."""


class ParityClass(StrEnum):
    """How much of the training's losses a lever may change."""

    EXACT = "exact"
    NUMERIC = "numeric"
    OBJECTIVE = "objective"
    """It changes what is trained, so losses are not compared, and it is never chosen."""


#: What tuned.yaml may get.
CHOSEN: Final = frozenset({ParityClass.EXACT, ParityClass.NUMERIC})

_REASONS: Final = {
    LeverVerdict.TOO_FEW_ROUNDS: "the interval is too wide to tell; give it a longer --budget",
    LeverVerdict.BROKEN: "the losses of its first steps are others than the baseline's",
}
_NOT_BEGUN: Final = "not begun before the tuning ended; give it a longer --budget"
_NOT_CHOSEN: Final = "it changes what is trained, so it is not chosen"

#: Of `tune --json`, in this order; `None` means not known.
KEYS: Final = (
    "lever", "setting", "speed_ratio", "speed_low", "speed_high", "rounds", "peak_bytes",
    "parity_class", "loss_gap", "verdict", "reason", "samples_per_s", "peak_delta_bytes",
    "host_bytes", "host_delta_bytes", "once_s",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Trial:
    """Some keys at other values than the baseline has, and what that brings."""

    lever: str
    """The key of `train:` or `workload:`; `all chosen`: the chosen ones together."""
    setting: str
    changes: Mapping[str, Any]
    parity_class: ParityClass | None = None
    """`None`: nothing is trained."""
    copies: int = 1
    """Workers at once."""
    slow: bool = False
    """Whether it compiles, for which a rehearsal has no time."""
    counts_waiting: bool = False
    """Whether time in which other programs have the processor counts: a loader waits for it in
    processes of its own, where that cannot be told from other waiting.
    """
    settled: bool = False
    """Whether a first look at its rounds has told its speed."""
    verdict: LeverVerdict = LeverVerdict.TOO_FEW_ROUNDS
    """UNAVAILABLE from the beginning where this kind of device cannot run it."""
    reason: str = _NOT_BEGUN
    speeds: list[tuple[float, float]] = field(default_factory=list)
    """Of each round, the lever's and the baseline's: samples a second, or tokens where lengths
    differ; for matmul 10^9 operations.
    """
    speed_ratio: float | None = None
    """The lever's speed divided by the baseline's of the same round: the median over all pairs of
    rounds.
    """
    speed_low: float | None = None
    speed_high: float | None = None
    """With `speed_low` the interval of `speed_ratio`; `None` with too few rounds for any."""
    loss_gap: float | None = None
    """The largest relative difference of the losses of the first steps to the baseline's."""
    peak_bytes: int | None = None
    """The highest use of the device by tensors in the first steps."""
    peak_delta_bytes: int | None = None
    """`peak_bytes` less the baseline's."""
    host_bytes: int | None = None
    """Resident memory of the process."""
    host_delta_bytes: int | None = None
    once_s: float | None = None
    """What the first step took beyond another one, such as a compilation."""

    @property
    def name(self) -> str:
        """What people and files call it."""
        return f"{self.lever}={self.setting}"

    @property
    def rounds(self) -> int:
        """Pairs of a turn of the lever and one of the baseline."""
        return len(self.speeds)

    @property
    def samples_per_s(self) -> float | None:
        """The lever's own speed, the median."""
        return median(own for own, _ in self.speeds) if self.speeds else None

    @property
    def peak_share(self) -> float | None:
        """The peak of the device's memory, of the baseline's; `None` where nothing is trained."""
        if self.parity_class is None or not self.peak_bytes:
            return None
        baseline_bytes = self.peak_bytes - (self.peak_delta_bytes or 0)
        return self.peak_bytes / baseline_bytes if baseline_bytes else None

    def opened(self, first: Opened, baseline: Opened) -> None:
        """Take in the first steps of both."""
        self.peak_bytes, self.host_bytes = first.peak_bytes, first.host_bytes
        self.peak_delta_bytes = first.peak_bytes - baseline.peak_bytes
        self.host_delta_bytes = first.host_bytes - baseline.host_bytes
        self.once_s = max(0.0, first.first_step_s - first.step_s)
        if self.parity_class in CHOSEN:
            self.loss_gap = parity_gap(first.losses, baseline.losses)

    def judge(self, rules: TuneConfig, lost: str | None, *, in_fp32: bool) -> None:
        """Set the figures of its speed, the verdict, and the reason.

        Args:
            rules: How sure a verdict must be, and which differences count as none.
            lost: Why its process, or the baseline's, could not go on.
            in_fp32: Whether the baseline computes in fp32. With another number type, also sums in
                another order differ by as much as number types do.
        """
        self._set_speed(rules, _FIRST_LOOK if self.settled else 1 - _FIRST_LOOK)
        most_gap = EXACT_GAP if self.parity_class is ParityClass.EXACT and in_fp32 else NUMERIC_GAP
        if lost is not None:
            self.verdict, self.reason = LeverVerdict.UNAVAILABLE, lost
            return
        self.verdict = self._of_speed(rules.resolve)
        is_less = self.peak_share is not None and self.peak_share < 1 - _SAME_BYTES
        if is_less and self.speed_low is not None and self.verdict is not LeverVerdict.FASTER:
            self.verdict = LeverVerdict.LESS_MEMORY
        if self.parity_class in CHOSEN and (self.loss_gap is None or self.loss_gap > most_gap):
            self.verdict = LeverVerdict.BROKEN
        helps = self.verdict in {LeverVerdict.FASTER, LeverVerdict.LESS_MEMORY}
        is_other = helps and self.parity_class is ParityClass.OBJECTIVE
        self.reason = _NOT_CHOSEN if is_other else _REASONS.get(self.verdict, "")

    def look(self, rules: TuneConfig) -> bool:
        """Return whether its speed is told after the rounds of the first look, and no more are due.

        Nothing else may end its rounds but the clock: an interval that is looked at again and again
        until it pleases holds less than it promises.
        """
        if self.rounds == least_rounds(rules, _FIRST_LOOK):
            self._set_speed(rules, _FIRST_LOOK)
            self.settled = self._of_speed(rules.resolve) is not LeverVerdict.TOO_FEW_ROUNDS
        return self.settled

    def _set_speed(self, rules: TuneConfig, share: float) -> None:
        """Set the estimate of Hodges and Lehmann, and Tukey's interval, between two of the Walsh
        averages: the values that Wilcoxon's signed-rank test does not reject (Hollander, Wolfe,
        Chicken: Nonparametric Statistical Methods, 3rd edition, 3.2 and 3.3).

        It asks for no distribution but a symmetric one, which the logarithm of a ratio of two equal
        arms has. With 20 rounds it finds twice as many levers of 5 % as the interval of the plain
        median (simulated).
        """
        logs = [math.log(own / other) for own, other in self.speeds]
        walsh = sorted(
            (one + other) / 2 for place, one in enumerate(logs) for other in logs[place:]
        )
        self.speed_ratio = math.exp(median(walsh)) if walsh else None
        left_out = _left_out(self.rounds, share * (1 - rules.confidence))
        if left_out is not None:
            self.speed_low = math.exp(walsh[left_out])
            self.speed_high = math.exp(walsh[-1 - left_out])

    def _of_speed(self, resolve: float) -> LeverVerdict:
        low, high = self.speed_low, self.speed_high
        if low is None or high is None:
            return LeverVerdict.TOO_FEW_ROUNDS
        found = {
            LeverVerdict.FASTER: low > 1 + resolve,
            LeverVerdict.SLOWER: high < 1 - resolve,
            LeverVerdict.NO_DIFFERENCE: 1 - resolve <= low and high <= 1 + resolve,
        }
        return next((each for each, is_so in found.items() if is_so), LeverVerdict.TOO_FEW_ROUNDS)

    def gain(self, rules: TuneConfig) -> float:
        """Return how many times better it is by what counts; 0 if it does not help, or is never
        chosen.
        """
        speed, peak_share = self.speed_ratio or 0.0, self.peak_share or 1.0
        is_faster = self.verdict is LeverVerdict.FASTER
        is_less = self.verdict is LeverVerdict.LESS_MEMORY
        as_fast = (self.speed_low or 0.0) >= 1 - rules.resolve
        helps, gain = {
            "speed": (is_faster or (is_less and as_fast), speed),
            "memory": (is_less or (is_faster and peak_share <= 1), 1 / peak_share),
            "balanced": ((is_faster or is_less) and speed > peak_share, speed / peak_share),
        }[rules.objective]
        return gain if helps and self.parity_class in CHOSEN else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as `tune --json` prints it."""
        return {key: getattr(self, key) for key in KEYS}


def parity_gap(losses: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the largest relative difference of losses; `None` if there is none, or no number."""
    pairs = zip(losses, baseline, strict=False)
    gaps = [abs(one - other) / max(abs(other), 1e-12) for one, other in pairs]
    return max(gaps) if gaps and all(map(math.isfinite, gaps)) else None


def chosen_of(trials: Sequence[Trial], rules: TuneConfig) -> list[Trial]:
    """Return the levers to use, the best first, one for each key."""
    taken: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: -trial.gain(rules)):
        is_free = not any(trial.changes.keys() & other.changes.keys() for other in taken)
        if is_free and trial.gain(rules) > 0:
            taken.append(trial)
    return taken


def least_rounds(rules: TuneConfig, share: float = 1 - _FIRST_LOOK) -> int:
    """Return how many rounds an interval needs: 6 where the confidence is 0.95, and 8 for a first
    look.
    """
    doubt = share * (1 - rules.confidence)
    return next(count for count in range(1, 64) if _left_out(count, doubt) is not None)


@cache
def _left_out(count: int, doubt: float) -> int | None:
    """Return how many Walsh averages of `count` rounds lie beyond the interval on each side.

    It is the largest k for which the sum of the positive ranks of `count` values is below k + 1
    with a probability of at most `doubt` / 2. `None`: there is no interval.
    """
    most = count * (count + 1) // 2
    ways = [1] + [0] * most  # sets of the ranks 1 to `count` with each sum
    for rank in range(1, count + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    reached = list(accumulate(ways))
    left_out = bisect_right(reached, doubt / 2 * 2**count) - 1
    return left_out if left_out >= 0 else None
