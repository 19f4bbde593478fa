"""The levers that `tune` measures, and the verdicts on their measurements. Pure.

A lever is a key of `train:` with the values to try. The baseline has the user's value, the lever
another one. To add a lever, add a line to `_LEVERS`. The kind of device, or the process that tries
a lever, says whether this machine can run it.

Each round gives one ratio of speeds: a turn of the lever against an adjacent turn of the baseline.
Their order alternates (A B B A ...), so that a machine that slows down favours neither. Does not
measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist, median
from typing import Any, Final

from orchestrator.errors import UsageError
from workers.training.settings import TrainSettings
from workers.tuning.messages import Turn

#: Share of the speed: differences up to this count as none.
RESOLVE: Final = 0.02

#: Standard deviations of an interval that contains the true value with a probability of 95 %.
_SIGMAS: Final = NormalDist().inv_cdf(1 - 0.05 / 2)

#: Fewer rounds have no interval of that probability.
LEAST_ROUNDS: Final = 6

#: Largest relative difference of losses for levers that only change the order of additions.
EXACT_GAP: Final = 1e-6
#: The same for levers that change the arithmetic. Measured in a small training over 100 steps: bf16
#: differs from fp32 by 2.5e-4, 8-bit AdamW by 5.9e-4, and another seed by 1.8e-2.
NUMERIC_GAP: Final = 5e-3

#: Peaks of equal arms differ by up to 5 % on a CPU (measured), and not at all on a card.
_SAME_BYTES: Final = 0.05


class LeverVerdict(StrEnum):
    """The verdict on a lever."""

    FASTER = "FASTER"
    """The whole interval is above 1.0 by more than `RESOLVE`."""
    LESS_MEMORY = "LESS MEMORY"
    """Its peak is at least 5 % lower. It may be slower: the interval says by how much."""
    NO_DIFFERENCE = "NO DIFFERENCE"
    """The whole interval is within `RESOLVE` of 1.0."""
    SLOWER = "SLOWER"
    TOO_FEW_ROUNDS = "TOO FEW ROUNDS"
    """There is no interval yet, or it is too wide for another verdict."""
    BROKEN = "BROKEN"
    """The lever changes the losses of the training more than its parity class allows."""
    UNAVAILABLE = "UNAVAILABLE"
    """This machine or this version cannot run the lever."""


class ParityClass(StrEnum):
    """How much of the training's losses a lever may change."""

    EXACT = "exact"
    NUMERIC = "numeric"
    OBJECTIVE = "objective"
    """The lever changes the objective: losses are not compared, and it is never chosen."""


#: Parity classes of levers that tuned.yaml may contain.
CHOSEN: Final = frozenset({ParityClass.EXACT, ParityClass.NUMERIC})

_REASONS: Final = {
    LeverVerdict.TOO_FEW_ROUNDS: "the interval is too wide to tell; give it a longer --budget",
    LeverVerdict.BROKEN: "the losses of its first steps differ from the baseline's",
}

#: Keys of a row of `tune --json`, in this order; `None` means unknown.
KEYS: Final = (
    "lever", "setting", "verdict", "reason", "speed_ratio", "speed_low", "speed_high", "rounds",
    "peak_bytes", "baseline_peak_bytes", "parity_class", "loss_gap",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Trial:
    """Some keys with other values than the baseline's, and the measurements of them."""

    lever: str
    """The key of `train:`; `workers` of matmul."""
    setting: str
    changes: Mapping[str, Any]
    parity_class: ParityClass | None = None
    """`None`: the workload is no training."""
    copies: int = 1
    """Number of workers at once."""
    verdict: LeverVerdict = LeverVerdict.TOO_FEW_ROUNDS
    """UNAVAILABLE from the beginning if this kind of device cannot run the lever."""
    reason: str = "not begun before the tuning ended; give it a longer --budget"
    speeds: list[tuple[float, float]] = field(default_factory=list)
    """Speeds of the lever and of the baseline in each round: samples per second, or tokens per
    second if lengths differ; for matmul 10^9 operations per second.
    """
    speed_ratio: float | None = None
    """Estimate of the lever's speed divided by the baseline's, see `_set_speed`."""
    speed_low: float | None = None
    speed_high: float | None = None
    """Interval of `speed_ratio`, with `speed_low`; `None` if there are too few rounds."""
    loss_gap: float | None = None
    """The largest relative difference of the losses of the first steps to the baseline's."""
    peak_bytes: int = 0
    """The most memory of the device that tensors take in a step."""
    baseline_peak_bytes: int = 0

    @property
    def name(self) -> str:
        """Name for people and files."""
        return f"{self.lever}={self.setting}"

    @property
    def rounds(self) -> int:
        """Number of pairs of a turn of the lever and one of the baseline."""
        return len(self.speeds)

    def add_round(self, own: Turn, baseline: Turn, same_age: Turn) -> None:
        """Add a round. Peaks grow with the age of a process, so memory is compared with `same_age`,
        the turn of the baseline's process with the same number.
        """
        self.speeds.append((own.speed, baseline.speed))
        self.peak_bytes = max(self.peak_bytes, own.peak_bytes)
        self.baseline_peak_bytes = max(self.baseline_peak_bytes, same_age.peak_bytes)
        if self.parity_class in CHOSEN:
            self.loss_gap = parity_gap(own.losses, baseline.losses)

    def judge(self, lost: str | None, *, in_fp32: bool) -> None:
        """Set the ratio of speeds with its interval, the verdict, and the reason.

        `lost` is why its process, or the baseline's, could not continue. If the baseline does not
        compute `in_fp32`, another order of additions changes losses as much as a number type does.
        """
        self._set_speed()
        most_gap = EXACT_GAP if self.parity_class is ParityClass.EXACT and in_fp32 else NUMERIC_GAP
        is_other = self.loss_gap is None or self.loss_gap > most_gap
        self.verdict = self._of_speed()
        if lost is not None:
            self.verdict = LeverVerdict.UNAVAILABLE
        elif self.rounds and self.parity_class in CHOSEN and is_other:
            self.verdict = LeverVerdict.BROKEN
        self.reason = lost or _REASONS.get(self.verdict, "")

    def _set_speed(self) -> None:
        """Set the Hodges-Lehmann estimate of the ratio, and Tukey's interval, whose ends are Walsh
        averages: the values that Wilcoxon's signed-rank test does not reject (Hollander, Wolfe,
        Chicken: Nonparametric Statistical Methods, 3rd edition, 3.2 and 3.3).

        It only assumes a symmetric distribution, which the logarithm of a ratio of two equal arms
        has. With 20 rounds it finds twice as many levers of 5 % as the interval of the plain median
        (simulated).
        """
        logs = [math.log(own / other) for own, other in self.speeds]
        walsh = sorted(
            (one + other) / 2 for place, one in enumerate(logs) for other in logs[place:]
        )
        self.speed_ratio = math.exp(median(walsh)) if walsh else None
        if self.rounds >= LEAST_ROUNDS:
            # The normal approximation of the statistic: from 6 rounds on, at most one rank off.
            deviation = math.sqrt(len(walsh) * (2 * self.rounds + 1) / 12)
            left_out = math.floor(len(walsh) / 2 - _SIGMAS * deviation - 0.5)
            self.speed_low = math.exp(walsh[left_out])
            self.speed_high = math.exp(walsh[-1 - left_out])

    def _of_speed(self) -> LeverVerdict:
        low, high = self.speed_low, self.speed_high
        if low is None or high is None:
            return LeverVerdict.TOO_FEW_ROUNDS
        takes_less = self.peak_bytes < (1 - _SAME_BYTES) * self.baseline_peak_bytes
        found = {
            LeverVerdict.FASTER: low > 1 + RESOLVE,
            LeverVerdict.LESS_MEMORY: takes_less and self.parity_class is not None,
            LeverVerdict.SLOWER: high < 1 - RESOLVE,
            LeverVerdict.NO_DIFFERENCE: low >= 1 - RESOLVE and high <= 1 + RESOLVE,
        }
        return next((each for each, is_so in found.items() if is_so), LeverVerdict.TOO_FEW_ROUNDS)

    def to_json(self) -> dict[str, Any]:
        """Return the row of `tune --json`."""
        return {key: getattr(self, key) for key in KEYS}


def parity_gap(losses: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the largest relative difference of losses; `None` without losses, or if not finite."""
    pairs = zip(losses, baseline, strict=False)
    gaps = [abs(one - other) / max(abs(other), 1e-12) for one, other in pairs]
    return max(gaps) if gaps and all(map(math.isfinite, gaps)) else None


def chosen_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials for tuned.yaml, the fastest first, one for each key: faster, or with less
    memory and not slower, and with the same objective.
    """
    chosen: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: -(trial.speed_ratio or 0.0)):
        is_less = trial.verdict is LeverVerdict.LESS_MEMORY
        helps = trial.verdict is LeverVerdict.FASTER or (
            is_less and (trial.speed_low or 0.0) >= 1 - RESOLVE
        )
        is_free = not any(trial.changes.keys() & other.changes.keys() for other in chosen)
        if helps and is_free and trial.parity_class in CHOSEN:
            chosen.append(trial)
    return chosen


@dataclass(frozen=True, slots=True)
class _Lever:
    key: str
    usual: Any
    """The value without the lever, for which `auto` stands."""
    values: Sequence[Any]
    parity: ParityClass
    on_cards: Sequence[Any] = ()
    """The values that have no effect without a card."""
    beside: Mapping[str, Any] | None = None
    """Other keys without which the lever has no effect."""


_EXACT, _NUMERIC, _OBJECTIVE = ParityClass.EXACT, ParityClass.NUMERIC, ParityClass.OBJECTIVE

#: In the order of measurement: the levers with the largest expected effect first.
_LEVERS: Final = (
    _Lever("precision", "fp32", ("bf16", "tf32", "fp16"), _NUMERIC, ("tf32",)),
    _Lever("optimizer", "adamw-foreach", ("adamw-fused", "adamw-loop", "adamw-8bit"), _NUMERIC),
    _Lever("recompute", "none", ("all",), _EXACT),
    _Lever("activations_on_host", False, (True,), _EXACT),
    _Lever("states_on_host", 0, (50, 100), _EXACT),
    _Lever("loader_workers", 0, (1, 2), _EXACT),
    _Lever("prefetch", 2, (4,), _EXACT, beside={"loader_workers": 1}),
    _Lever("pin", True, (False,), _EXACT, (True, False)),
    _Lever("bucketing", False, (True,), _OBJECTIVE),
    _Lever("packing", False, (True,), _OBJECTIVE),
    _Lever("adapter", "none", ("lora", "dora"), _OBJECTIVE),
    _Lever("ema_decay", None, (0.99,), _OBJECTIVE),
    _Lever("ema_on", "device", ("host",), _OBJECTIVE, beside={"ema_decay": 0.99}),
    _Lever("dropout", 0.0, (0.1,), _OBJECTIVE),
    _Lever("label_smoothing", 0.0, (0.1,), _OBJECTIVE),
    _Lever("r_drop", 0.0, (0.5,), _OBJECTIVE, beside={"dropout": 0.1}),
    _Lever("layer_decay", 1.0, (0.9,), _OBJECTIVE),
    _Lever("deterministic", False, (True,), _NUMERIC),
    _Lever("compile", "off", ("block", "model"), _NUMERIC),
)

#: Values with which a key is off: a lever that needs the key then sets it as well.
_OFF: Final = (None, False, 0, "off", "none")


def train_trials(train: TrainSettings, *, on_card: bool) -> list[Trial]:
    """Return one trial for each value of a lever that differs from the user's own."""
    batch = train.batch
    micro = _Lever("micro", batch, [size for size in (batch // 2, batch // 4) if size], _EXACT)
    more = _Lever("batch", batch, (batch + batch // 2, 2 * batch), _OBJECTIVE)
    return [
        trial
        for lever in (micro, *_LEVERS, more)
        for trial in _trials_of(lever, train.model_dump(), on_card=on_card)
    ]


def for_rehearsal(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that tuned.yaml may get, without those that cannot run and without
    `compile`, which starts slowly: a rehearsal has minutes on two cores.
    """
    return [
        trial
        for trial in trials
        if trial.parity_class in CHOSEN
        and trial.verdict is not LeverVerdict.UNAVAILABLE
        and trial.lever != "compile"
    ]


def named(trials: Sequence[Trial], names: Sequence[str]) -> list[Trial]:
    """Return the trials with these names, a key or `key=value`; all if there are no names.

    `UsageError`: a name matches no lever.
    """
    valid = {name for each in trials for name in (each.lever, each.name)}
    if unknown := [name for name in names if name not in valid]:
        keys = ", ".join(dict.fromkeys(each.lever for each in trials))
        raise UsageError(
            f"--levers names {unknown[0]!r}, which is no lever; valid: {keys}, or KEY=VALUE"
        )
    return [each for each in trials if not names or {each.lever, each.name} & {*names}]


def _trials_of(lever: _Lever, own: Mapping[str, Any], *, on_card: bool) -> Iterator[Trial]:
    now = own.get(lever.key)
    for value in (lever.usual, *lever.values):
        is_usual = value == lever.usual
        if now == value or (now == "auto" and is_usual):
            continue
        needed = {} if is_usual else lever.beside or {}
        beside = {key: other for key, other in needed.items() if own.get(key) in _OFF}
        words = [_text_of(value), *(f"{key} {_text_of(other)}" for key, other in beside.items())]
        trial = Trial(
            lever=lever.key,
            setting=" with ".join(words),
            changes={**beside, lever.key: value},
            parity_class=lever.parity,
        )
        if value in lever.on_cards and not on_card:
            trial.verdict = LeverVerdict.UNAVAILABLE
            trial.reason = "it has no effect without a card, and this device is the CPU"
        yield trial


def _text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
