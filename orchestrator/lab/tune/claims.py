"""The guides' claims as values: what `claims.toml` holds, checked. Pure, but for `load`, which
reads that file.

Does not judge a claim (`claims_verdict.py`) and does not collect what is known here
(`claims_facts.py`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

How: TypeAlias = Literal["tune", "plan", "card", "torch", "sum", "here", "run", "none"]
Workload: TypeAlias = Literal["gpt", "cnn", "matmul"]

#: What is claimed, the unit that is shown, and the value of "no effect". `None`: right or wrong as
#: it is.
QUANTITIES: Final[Mapping[str, tuple[str, float | None]]] = {
    "speed": ("x", 1.0),
    "saved_pct": ("%", 0.0),
    "gain": ("x", 1.0),
    "ratio": ("x", None),
    "pct": ("%", None),
    "gib": ("GiB", None),
    "mib": ("MiB", None),
    "count": ("", None),
    "parameters_m": ("M", None),
    "power_w": ("W", None),
    "temperature_c": ("C", None),
    "clock_mhz": ("MHz", None),
    "bandwidth_gb_s": ("GB/s", None),
    "seconds": ("s", None),
    "minutes": ("min", None),
    "hours": ("h", None),
    "samples_per_s": ("/s", None),
    "degrees": ("deg", None),
}

#: What a claim needs that this product does not bring, and so why it cannot be tested.
NEEDS: Final[Mapping[str, str]] = {
    "sharding": "no model is divided among workers here: each worker trains its own",
    "overclocking": "a run never changes clocks; only `burn --sweep` does, as root, and it "
    "measures no training",
    "own-kernels": "no CUDA kernel was written for this product",
    "power-supply": "no sensor tells what a power supply can deliver",
    "memory-use": "how long a card's memory is busy is not recorded",
    "cpu-use": "how busy the CPUs are is not recorded by a run",
    "guide-program": "it is about the guide's own program as it was, which is not here",
    "guide-images": "the images of 300W-LP and BIWI are not here: data sets are made, or yours",
    "guide-model": "the weights and texts of the guide's model, Gemma-1B, are not here",
    "item-key": "no key adds a second .item(): the loop reads the loss once for each optimiser "
    "step",
    "evaluation-key": "no key moves the sums of an evaluation off the card: they are made there",
    "tripled-batch": "a tuning tries a batch half as large again and one twice as large, not one "
    "of three times",
    "person": "how long a person works on it is not measured",
    "points": "points have no unit in which they could be measured",
}

#: The families of names that a value may be made of, by how it is found.
_FAMILIES: Final[Mapping[How, frozenset[str]]] = {
    "plan": frozenset({"plan"}),
    "card": frozenset({"card"}),
    "torch": frozenset({"torch"}),
    "sum": frozenset({"card"}),
    "here": frozenset({"here"}),
    "run": frozenset({"run"}),
    "tune": frozenset(),
    "none": frozenset(),
}


def _known_need(need: str) -> str:
    if need not in NEEDS:
        raise ValueError(f"there is no need {need!r}; valid: {', '.join(NEEDS)}")
    return need


class Claim(BaseModel):
    """One numeric claim of one line of a guide."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: str
    line: int
    says: str
    how: How
    quantity: str
    low: float | None = None
    """`None`: open to this side."""
    high: float | None = None
    value: str | None = None
    """An expression, see `claims_verdict.span_of`."""
    value_high: str | None = None
    """The upper end, where the value is a range."""
    lever: str | None = None
    setting: str | None = None
    against: str | None = None
    """The other setting that it is compared with; `None`: the baseline."""
    workload: Workload | None = None
    rated: str | None = None
    """What the card's data let expect; shown until it is measured, and never judged."""
    on: str | None = None
    """The only card that it holds for, by its key in `gpu_specs`."""
    needs: tuple[Annotated[str, AfterValidator(_known_need)], ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Refuse a row that could not be computed."""
        if self.quantity not in QUANTITIES:
            raise ValueError(
                f"there is no quantity {self.quantity!r}; valid: {', '.join(QUANTITIES)}"
            )
        if self.low is None and self.high is None:
            raise ValueError("it claims no number: set low or high")
        arm = (self.lever, self.setting, self.workload)
        if (self.how == "tune") != all(arm) or (self.how != "tune" and any(arm)):
            raise ValueError(
                "lever, setting and workload belong to how: tune, which needs all three"
            )
        if (self.how == "none") != bool(self.needs):
            raise ValueError("needs belongs to how: none, which needs it")
        if (self.value is None) != (self.how in {"tune", "none"}):
            raise ValueError("a value belongs to each how but tune and none")
        families = {
            name.split(".")[0] for name in names_in(f"{self.value or ''} {self.value_high or ''}")
        }
        if families - _FAMILIES[self.how]:
            raise ValueError(
                f"how: {self.how} knows no {', '.join(sorted(families - _FAMILIES[self.how]))}"
            )
        return self


class Guide(BaseModel):
    """One guide and its claims, in the order of its lines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: str
    title: str
    claims: tuple[Claim, ...]


class Claims(BaseModel):
    """All of `claims.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    """Memory plans by name: keys of `train:` and what `workers.training.plans_main` takes beside
    them.
    """
    guide: tuple[Guide, ...] = ()

    @property
    def all(self) -> tuple[Claim, ...]:
        """The claims of all guides."""
        return tuple(claim for guide in self.guide for claim in guide.claims)


def parse(text: str) -> Claims:
    """Return what a file like `claims.toml` holds.

    Raises:
        ValueError: It is no TOML, or a row is incomplete; the message names the row.
    """
    plain = tomllib.loads(text)
    for guide in plain.get("guide", ()):
        guide["claims"] = [{"seed": guide["seed"], **claim} for claim in guide["claims"]]
    return Claims.model_validate(plain)


def load() -> Claims:
    """Return the guides' claims."""
    return parse(resources.files(__package__).joinpath("claims.toml").read_text(encoding="utf-8"))


def workload_of(model: str) -> Workload | None:
    """Return which claims a tuning of this model answers; `None`: those of no guide."""
    for workload in ("matmul", "gpt", "cnn"):
        if model.startswith(workload):
            return workload
    return None


def names_in(expression: str) -> list[str]:
    """Return the dotted names of an expression."""
    return re.findall(r"[a-z]\w*(?:\.\w+)+", expression)
