"""The levers that `tune` measures, as data, and the baseline they are compared with. Pure.

A lever is a key of `train:` at a value. In the baseline every lever that changes no objective has
its plain value, so that a row says what the lever alone brings. Keys that change what is trained
stay as the user has them. Whether this version and this machine can run a lever is computed: by
`TrainSettings`, by the kind of device, and by the arm itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune.rows import ParityClass
from orchestrator.lab.tune.verdicts import Aim
from workers.training.settings import TrainSettings

_EXACT, _NUMERIC, _OBJECTIVE = ParityClass.EXACT, ParityClass.NUMERIC, ParityClass.OBJECTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One arm beside the baseline: some keys at other values."""

    lever: str
    setting: str
    changes: Mapping[str, Any]
    parity: ParityClass | None = None
    """`None`: nothing is trained."""
    aim: Aim = "speed"
    needs_card: str | None = None
    """Why it says nothing without a card."""
    copies: int = 1
    """Workers at once."""
    slow: bool = False
    """Whether it takes longer to begin than a rehearsal has time for."""
    beside: str | None = None
    """The arm that has the other keys which this lever needs, and not the lever: what it is judged
    against.
    """

    @property
    def name(self) -> str:
        """What rounds and files call it."""
        return f"{self.lever}={self.setting}"


@dataclass(frozen=True, slots=True)
class _Lever:
    key: str
    values: Sequence[Any]
    parity: ParityClass
    aim: Aim = "speed"
    needs_card: str | None = None
    beside: Mapping[str, Any] | None = None
    """Other keys without which it does nothing."""
    slow: bool = False


#: What a training has before any lever is set.
PLAIN: Final[Mapping[str, Any]] = {
    "precision": "fp32",
    "attention": "auto",
    "compile": "off",
    "channels_last": False,
    "cudnn_benchmark": False,
    "optimizer": "adamw-foreach",
    "micro": "auto",
    "recompute": "none",
    "activations_on_host": False,
    "states_on_host": 0,
    "set_to_none": True,
    "bucketing": False,
    "packing": False,
    "loader_workers": 0,
    "prefetch": 2,
    "pin": False,
    "persistent": True,
    "non_blocking": False,
    "ram_cache": False,
    "deterministic": False,
    "exact": False,
}

_COPIES: Final = "it changes copies from the host to a card, and this device is the CPU"

_OF_A_CARD: Final = frozenset({"pin", "non_blocking", "cudnn_benchmark"})

#: In the order of the ladder: what is stacked first stands first.
_LEVERS: Final = (
    _Lever("precision", ("tf32",), _NUMERIC, needs_card="tf32 is a mode of a card's matrix units"),
    _Lever("precision", ("bf16", "fp16"), _NUMERIC),
    _Lever("attention", ("math", "efficient", "flash"), _NUMERIC),
    _Lever("attention", ("cudnn",), _NUMERIC, needs_card="cuDNN is a library for cards"),
    _Lever("compile", ("block", "model"), _NUMERIC, slow=True),
    _Lever(
        "compile_mode",
        ("reduce-overhead", "max-autotune"),
        _NUMERIC,
        beside={"compile": "block"},
        slow=True,
    ),
    _Lever("channels_last", (True,), _NUMERIC),
    _Lever("cudnn_benchmark", (True,), _NUMERIC, needs_card="cuDNN is a library for cards"),
    _Lever("optimizer", ("adamw-fused", "adamw-loop"), _NUMERIC),
    _Lever("optimizer", ("adamw-8bit",), _NUMERIC, "memory"),
    _Lever("set_to_none", (False,), _EXACT),
    _Lever("loader_workers", (1, 2, "auto"), _EXACT),
    _Lever("prefetch", (4,), _EXACT, beside={"loader_workers": 1}),
    _Lever("persistent", (False,), _EXACT, beside={"loader_workers": 1}),
    _Lever("pin", (True,), _EXACT, needs_card=_COPIES),
    _Lever("non_blocking", (True,), _EXACT, needs_card=_COPIES, beside={"pin": True}),
    _Lever("ram_cache", (True,), _EXACT),
    _Lever("bucketing", (True,), _OBJECTIVE),
    _Lever("packing", (True,), _OBJECTIVE),
    _Lever("deterministic", (True,), _NUMERIC),
    _Lever("recompute", ("all",), _EXACT, "memory"),
    _Lever("activations_on_host", (True,), _EXACT, "memory"),
    _Lever("states_on_host", (50, 100), _EXACT, "memory"),
    _Lever("ema_decay", (0.99,), _OBJECTIVE, "loss"),
    _Lever("ema_on", ("host",), _OBJECTIVE, "memory", beside={"ema_decay": 0.99}),
    _Lever("dropout", (0.1,), _OBJECTIVE, "loss"),
    _Lever("label_smoothing", (0.1,), _OBJECTIVE, "loss"),
    _Lever("r_drop", (0.5,), _OBJECTIVE, "loss", beside={"dropout": 0.1}),
    _Lever("layer_decay", (0.9,), _OBJECTIVE, "loss"),
    _Lever("adapter", ("lora", "dora"), _OBJECTIVE, "memory"),
)


#: Speed and peak memory to expect of a lever, times the baseline's; of others 1. Rough figures for
#: cards (docs/guides.md), else measured on two cores. They decide what is measured first, and no more.
EXPECTED: Final[Mapping[str, tuple[float, float]]] = {
    "precision": (1.75, 0.8), "packing": (1.5, 1.0), "bucketing": (1.3, 1.0), "compile": (1.3, 1.0),
    "loader_workers": (1.2, 1.0), "channels_last": (1.15, 1.0), "attention": (1.1, 1.0),
    "compile_mode": (1.1, 1.0), "cudnn_benchmark": (1.1, 1.0), "pin": (1.1, 1.0),
    "optimizer": (1.07, 0.95), "ram_cache": (1.05, 1.0), "non_blocking": (1.05, 1.0),
    "batch": (1.05, 1.5), "prefetch": (1.02, 1.0), "set_to_none": (0.99, 1.0),
    "persistent": (0.98, 1.0), "states_on_host": (0.97, 0.9), "ema_on": (0.97, 1.0),
    "micro": (0.93, 0.6), "deterministic": (0.9, 1.0), "dropout": (0.9, 1.0), "adapter": (0.9, 0.9),
    "activations_on_host": (0.8, 0.5), "recompute": (0.75, 0.5), "r_drop": (0.6, 1.7),
}  # fmt: skip


def baseline_of(train: TrainSettings, *, on_card: bool) -> dict[str, Any]:
    """Return the user's section with all levers of speed and memory at their plain values.

    Without a card, keys that only a card heeds stay as they are.
    """
    kept = frozenset() if on_card else _OF_A_CARD
    return {
        key: value if key in kept else PLAIN.get(key, value)
        for key, value in train.model_dump().items()
    }


def train_candidates(baseline: Mapping[str, Any]) -> list[Candidate]:
    """Return one candidate for each lever and value that is not the baseline's own."""
    return [
        each
        for each in _all(baseline)
        if any(baseline.get(key) != value for key, value in each.changes.items())
    ]


def chosen(
    candidates: Sequence[Candidate], wanted: Sequence[str], where: str = "--levers"
) -> list[Candidate]:
    """Return the candidates that are named `where`, by key or by `key=value`; all if none is named.

    Raises:
        UsageError: A name fits no lever.
    """
    known = {name for each in candidates for name in (each.lever, each.name)}
    if unknown := [name for name in wanted if name not in known]:
        levers = ", ".join(dict.fromkeys(each.lever for each in candidates))
        raise UsageError(
            f"{where} names {unknown[0]!r}, which is none; valid: {levers}, or one as KEY=VALUE"
        )
    return picked(candidates, wanted)


def picked(candidates: Sequence[Candidate], wanted: Sequence[str]) -> list[Candidate]:
    """Return the same, where names were checked before.

    What the baseline has already is no candidate.
    """
    return [
        each for each in candidates if not wanted or each.lever in wanted or each.name in wanted
    ]


def for_rehearsal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return one value of each key, without those that are slow to begin: what fits into minutes on
    two cores.
    """
    first = {
        each.lever: each
        for each in reversed(candidates)
        if not each.slow and each.needs_card is None
    }
    return [
        each for each in candidates if first.get(each.lever) is each or each.needs_card is not None
    ]


def unavailable(candidate: Candidate, baseline: Mapping[str, Any], *, on_card: bool) -> str | None:
    """Return why this version or this kind of device cannot run a candidate.

    `None`: only trying tells.
    """
    try:
        TrainSettings.model_validate({**baseline, **candidate.changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["train", *(str(part) for part in first["loc"][:1])])
        if first["type"] == "extra_forbidden":
            return f"this version has no key {key}"
        return one_line(f"{key}: {first['msg']}")[:300]
    if candidate.needs_card is not None and not on_card:
        return candidate.needs_card
    return None


def _all(baseline: Mapping[str, Any]) -> Iterator[Candidate]:
    batch = int(baseline["batch"])
    for micro in dict.fromkeys((batch // 2, batch // 4)):
        if micro:
            yield Candidate(
                lever="micro",
                setting=str(micro),
                changes={"micro": micro},
                parity=_EXACT,
                aim="memory",
            )
    for lever in _LEVERS:
        for value in lever.values:
            beside = {
                key: other
                for key, other in (lever.beside or {}).items()
                if baseline.get(key) != other
            }
            with_ = "".join(f" with {key} {_text(other)}" for key, other in beside.items())
            arms = [f"{key}={_text(other)}" for key, other in beside.items()]
            yield Candidate(
                lever=lever.key,
                setting=_text(value) + with_,
                changes={**beside, lever.key: value},
                parity=lever.parity,
                aim=lever.aim,
                needs_card=lever.needs_card,
                slow=lever.slow,
                beside=arms[0] if len(arms) == 1 else None,
            )
    for more in (batch + batch // 2, 2 * batch):
        yield Candidate(
            lever="batch", setting=str(more), changes={"batch": more}, parity=_OBJECTIVE
        )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
