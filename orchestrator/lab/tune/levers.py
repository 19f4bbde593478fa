"""The levers that `tune` measures, as data. Pure.

A lever is a key of `train:` or of `workload:` with the values that are tried. Off is what the
user's own file says, and on another value. To add a lever, add a line to `_LEVERS`. Whether this
machine can run it is told by the kind of device, or by the process that tries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.errors import UsageError
from orchestrator.lab.tune.trial import CHOSEN, LeverVerdict, ParityClass, Trial
from workers.training.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class _Lever:
    key: str
    usual: Any
    """What a training has without the lever, and what `auto` stands for."""
    values: Sequence[Any]
    parity: ParityClass
    on_cards: Sequence[Any] = ()
    """The values that say nothing without a card."""
    beside: Mapping[str, Any] | None = None
    """Other keys without which it does nothing."""
    slow: bool = False


_EXACT, _NUMERIC, _OBJECTIVE = ParityClass.EXACT, ParityClass.NUMERIC, ParityClass.OBJECTIVE

_ON_CARDS: Final = "it says nothing without a card, and this device is the CPU"
_LOADER: Final = {"loader_workers": 1}
_AVERAGE: Final = {"ema_decay": 0.99}

#: In the order in which they are measured: first those of which most is expected.
_LEVERS: Final = (
    _Lever("precision", "fp32", ("bf16", "tf32", "fp16"), _NUMERIC, ("tf32",)),
    _Lever("optimizer", "adamw-foreach", ("adamw-fused", "adamw-loop", "adamw-8bit"), _NUMERIC),
    _Lever("recompute", "none", ("all",), _EXACT),
    _Lever("activations_on_host", False, (True,), _EXACT),
    _Lever("states_on_host", 0, (50, 100), _EXACT),
    _Lever("attention", "auto", ("math", "efficient", "flash", "cudnn"), _NUMERIC, ("cudnn",)),
    _Lever("channels_last", False, (True,), _NUMERIC),
    _Lever("loader_workers", 0, (1, 2), _EXACT),
    _Lever("prefetch", 2, (4,), _EXACT, beside=_LOADER),
    _Lever("pin", True, (False,), _EXACT, (True, False)),
    _Lever("non_blocking", True, (False,), _EXACT, (True, False), beside={"pin": True}),
    _Lever("ram_cache", False, (True,), _EXACT),
    _Lever("bucketing", False, (True,), _OBJECTIVE),
    _Lever("packing", False, (True,), _OBJECTIVE),
    _Lever("adapter", "none", ("lora", "dora"), _OBJECTIVE),
    _Lever("ema_decay", None, (0.99,), _OBJECTIVE),
    _Lever("ema_on", "device", ("host",), _OBJECTIVE, beside=_AVERAGE),
    _Lever("dropout", 0.0, (0.1,), _OBJECTIVE),
    _Lever("label_smoothing", 0.0, (0.1,), _OBJECTIVE),
    _Lever("r_drop", 0.0, (0.5,), _OBJECTIVE, beside={"dropout": 0.1}),
    _Lever("layer_decay", 1.0, (0.9,), _OBJECTIVE),
    _Lever("deterministic", False, (True,), _NUMERIC),
    _Lever("compile", "off", ("block", "model"), _NUMERIC, slow=True),
    _Lever(
        "compile_mode",
        "default",
        ("reduce-overhead", "max-autotune"),
        _NUMERIC,
        beside={"compile": "block"},
        slow=True,
    ),
)

#: Values of a key with which it is off, so that a lever that needs it brings it along.
_OFF: Final = (None, False, 0, "off", "none")


def train_trials(train: TrainSettings, *, on_card: bool) -> list[Trial]:
    """Return one trial for each lever and value that is not the user's own."""
    batch = train.batch
    micro = _Lever("micro", batch, [size for size in (batch // 2, batch // 4) if size], _EXACT)
    more = _Lever("batch", batch, (batch + batch // 2, 2 * batch), _OBJECTIVE)
    return [
        trial
        for lever in (micro, *_LEVERS, more)
        for trial in _trials_of(lever, train.model_dump(), on_card=on_card)
    ]


def for_rehearsal(trials: Sequence[Trial]) -> list[Trial]:
    """Return one value of each key that tuned.yaml may get and that is quick to begin: what fits
    into minutes on two cores.
    """
    first: dict[str, Trial] = {}
    for trial in trials:
        is_possible = trial.verdict is not LeverVerdict.UNAVAILABLE
        if trial.parity_class in CHOSEN and is_possible and not trial.slow:
            first.setdefault(trial.lever, trial)
    return list(first.values())


def named(trials: Sequence[Trial], names: Sequence[str], where: str) -> list[Trial]:
    """Return the trials that are named, by key or by `key=value`; all if none is named.

    Raises:
        UsageError: A name fits no lever; `where` is where it stands.
    """
    valid = {name for each in trials for name in (each.lever, each.name)}
    if unknown := [name for name in names if name not in valid]:
        keys = ", ".join(dict.fromkeys(each.lever for each in trials))
        raise UsageError(
            f"{where} names {unknown[0]!r}, which is none; valid: {keys}, or one as KEY=VALUE"
        )
    return [each for each in trials if not names or {each.lever, each.name} & {*names}]


def matmul_trials() -> list[Trial]:
    """Return the trials of matmul: several workers at once, against one."""
    return [
        Trial(lever="workers", setting=str(count), changes={}, copies=count) for count in (2, 3)
    ]


def together(several: Sequence[Trial]) -> Trial:
    """Return one trial with the changes of several."""
    is_exact = all(each.parity_class is _EXACT for each in several)
    return Trial(
        lever="all chosen",
        setting=" + ".join(each.name for each in several),
        changes={key: value for each in several for key, value in each.changes.items()},
        parity_class=_EXACT if is_exact else _NUMERIC,
        counts_waiting=any(each.counts_waiting for each in several),
    )


def _trials_of(lever: _Lever, own: Mapping[str, Any], *, on_card: bool) -> Iterator[Trial]:
    now = own.get(lever.key)
    for value in (lever.usual, *lever.values):
        is_usual = value == lever.usual
        if now == value or (now == "auto" and is_usual):
            continue
        needed = {} if is_usual else lever.beside or {}
        beside = {key: other for key, other in needed.items() if own.get(key) in _OFF}
        changes = {**beside, lever.key: value}
        loaders = {own.get("loader_workers"), changes.get("loader_workers", 0)}
        trial = Trial(
            lever=lever.key,
            setting=" with ".join(
                [_text_of(value), *(f"{key} {_text_of(other)}" for key, other in beside.items())]
            ),
            changes=changes,
            parity_class=lever.parity,
            slow=lever.slow,
            counts_waiting=loaders != {0},
        )
        if value in lever.on_cards and not on_card:
            trial.verdict, trial.reason = LeverVerdict.UNAVAILABLE, _ON_CARDS
        yield trial


def _text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
