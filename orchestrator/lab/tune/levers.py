"""The levers that `tune` measures, as data, and the baseline they are compared with. Pure.

A lever is a key of `train:` or of `workload:` at a value. In the baseline every lever that changes
no objective has its plain value, so that a row says what the lever alone brings. Keys that change
what is trained stay as the user has them. Whether this version and this machine can run a lever is
computed: by `TrainSettings`, by the kind of device, and by the arm itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic import ValidationError

from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune.results import ParityClass
from workers.training.settings import TrainSettings
from workers.tuning.messages import ArmSpec

Aim: TypeAlias = Literal["speed", "memory", "loss"]

MakeSpec: TypeAlias = Callable[[str, Mapping[str, Any], int], ArmSpec]
"""From name, changes against the baseline, and how much to add to the seed."""

#: The workload that is tuned where nothing is trained.
MATMUL: Final = "matmul"


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
    """The arm with the other keys that this lever needs: what it is judged against."""

    @property
    def name(self) -> str:
        """What rounds and files call it."""
        return f"{self.lever}={self.setting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """What is tuned: a training, or matmul."""

    model: str
    """As results are found again by."""
    trains: bool
    """Whether losses are compared."""
    dtype_key: str
    """The key that says in which number type an arm computes."""
    baseline: Mapping[str, Any]
    candidates: Sequence[Candidate]
    impossible: Mapping[str, str]
    """Why some candidates cannot be tried, by name."""
    yours: Candidate | None
    """The user's own settings; `None` where those are the baseline, or nothing is chosen."""
    make_spec: MakeSpec


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
    "precision": "fp32", "attention": "auto", "compile": "off", "channels_last": False,
    "cudnn_benchmark": False, "optimizer": "adamw-foreach", "micro": "auto", "recompute": "none",
    "activations_on_host": False, "states_on_host": 0, "set_to_none": True, "bucketing": False,
    "packing": False, "loader_workers": 0, "prefetch": 2, "pin": False, "persistent": True,
    "non_blocking": False, "ram_cache": False, "deterministic": False, "exact": False,
}  # fmt: skip

_EXACT, _NUMERIC, _OBJECTIVE = ParityClass.EXACT, ParityClass.NUMERIC, ParityClass.OBJECTIVE

_COPIES: Final = "it changes copies from the host to a card, and this device is the CPU"
_CUDNN: Final = "cuDNN is a library for cards"
_TF32: Final = "tf32 is a mode of a card's matrix units"

_OF_A_CARD: Final = frozenset({"pin", "non_blocking", "cudnn_benchmark"})

#: In the order of the ladder: what is stacked first stands first.
_LEVERS: Final = (
    _Lever("precision", ("tf32",), _NUMERIC, needs_card=_TF32),
    _Lever("precision", ("bf16", "fp16"), _NUMERIC),
    _Lever("attention", ("math", "efficient", "flash"), _NUMERIC),
    _Lever("attention", ("cudnn",), _NUMERIC, needs_card=_CUDNN),
    _Lever("compile", ("block", "model"), _NUMERIC, slow=True),
    _Lever(
        "compile_mode",
        ("reduce-overhead", "max-autotune"),
        _NUMERIC,
        beside={"compile": "block"},
        slow=True,
    ),
    _Lever("channels_last", (True,), _NUMERIC),
    _Lever("cudnn_benchmark", (True,), _NUMERIC, needs_card=_CUDNN),
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
#: cards (docs/guides.md), else measured on two cores. They decide what is measured first, and no
#: more.
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
    plain = {key: value for key, value in PLAIN.items() if on_card or key not in _OF_A_CARD}
    own = train.model_dump()
    return own | {key: value for key, value in plain.items() if key in own}


def train_candidates(baseline: Mapping[str, Any]) -> list[Candidate]:
    """Return one candidate for each lever and value that is not the baseline's own."""
    return [
        candidate
        for candidate in _train_candidates(baseline)
        if any(baseline.get(key) != value for key, value in candidate.changes.items())
    ]


def named(candidates: Sequence[Candidate], names: Sequence[str]) -> list[Candidate]:
    """Return the candidates that are named, by key or by `key=value`; all if none is named."""
    return [
        candidate
        for candidate in candidates
        if not names or {candidate.lever, candidate.name} & {*names}
    ]


def check_names(candidates: Sequence[Candidate], names: Sequence[str], where: str) -> None:
    """Refuse, as a `UsageError`, a name that fits no lever; `where` is where it stands."""
    valid = {name for candidate in candidates for name in (candidate.lever, candidate.name)}
    if unknown := [name for name in names if name not in valid]:
        levers = ", ".join(dict.fromkeys(candidate.lever for candidate in candidates))
        raise UsageError(
            f"{where} names {unknown[0]!r}, which is none; valid: {levers}, or one as KEY=VALUE"
        )


def for_rehearsal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return one value of each key that is quick to begin: what fits into minutes on two cores."""
    quick = [
        candidate for candidate in candidates if not candidate.slow and candidate.needs_card is None
    ]
    first = {candidate.lever: candidate for candidate in reversed(quick)}
    return [
        candidate
        for candidate in candidates
        if first.get(candidate.lever) is candidate or candidate.needs_card is not None
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
    return None if on_card else candidate.needs_card


def matmul_baseline(size: int) -> dict[str, Any]:
    """Return what the other arms of matmul differ from: one worker with fp32, without rest."""
    return {"dtype": "fp32", "size": size, "workers": 1, "duty": None}


def matmul_candidates(baseline: Mapping[str, Any], duty: float | None) -> list[Candidate]:
    """Return all candidates of matmul; `duty` is that of the configuration."""
    size = int(baseline["size"])
    shares = [share for share in dict.fromkeys((duty, 0.6)) if share is not None and share < 1]
    keys = [
        *(("dtype", name, name) for name in ("tf32", "fp16", "bf16")),
        *(("size", str(other), other) for other in (size // 2, 2 * size)),
        *(("duty", f"{share:g}", share) for share in shares),
    ]
    plain = [
        Candidate(
            lever=key,
            setting=setting,
            changes={key: value},
            needs_card=_TF32 if value == "tf32" else None,
        )
        for key, setting, value in keys
    ]
    several = [
        Candidate(lever="workers", setting=str(count), changes={"workers": count}, copies=count)
        for count in (2, 3, 7)
    ]
    return [*plain, *several]


def matmul_impossible(
    candidates: Sequence[Candidate],
    *,
    on_card: bool,
    room_bytes: int,
    budget_bytes: int,
) -> dict[str, str]:
    """Return why some candidates of matmul cannot be tried.

    Args:
        candidates: All of them.
        on_card: Whether the device is a card.
        room_bytes: What all workers of an arm may hold together.
        budget_bytes: What each of them holds.
    """
    reasons: dict[str, str] = {}
    for candidate in candidates:
        if candidate.needs_card is not None and not on_card:
            reasons[candidate.name] = candidate.needs_card
        elif candidate.copies * budget_bytes > room_bytes:
            reasons[candidate.name] = (
                f"{candidate.copies} workers of {budget_bytes / 2**30:.2f} GiB do not fit "
                f"{room_bytes / 2**30:.2f} GiB"
            )
    return reasons


def _train_candidates(baseline: Mapping[str, Any]) -> Iterator[Candidate]:
    batch = int(baseline["batch"])
    for micro in dict.fromkeys((batch // 2, batch // 4)):
        if micro:
            changes = {"micro": micro}
            yield Candidate(
                lever="micro", setting=str(micro), changes=changes, parity=_EXACT, aim="memory"
            )
    for lever in _LEVERS:
        others = (lever.beside or {}).items()
        beside = {key: value for key, value in others if baseline.get(key) != value}
        arms = [f"{key}={_text(value)}" for key, value in beside.items()]
        for value in lever.values:
            with_ = "".join(f" with {key} {_text(other)}" for key, other in beside.items())
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
