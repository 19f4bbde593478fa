"""The three phases of validation as configurations: what each one changes, and for how long.

Covers which number types a card can do and the plan of runs. Does not run anything (`verb.py`) and
does not judge (`verdict.py`). Pure.

1. Caps and precision: one short run for each number type, results checked densely. 2. Heat: every
worker at full duty, for as long as the user asks.
3. Full load: the configuration as it is, with its own workload, shares and caps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

from orchestrator.config.gpu_specs import ARCHITECTURES
from orchestrator.config.schema import Config, WorkloadConfig

#: Long enough for the air in a closed case to become as warm as it will.
HEAT_S = 3600.0

#: Long enough for a worker to climb to its cap and to check some hundred results.
_PRECISION_S = 30.0

#: Share of the time for checks in the first phase: one result in a few, and the caps stay filled
#: meanwhile.
_DENSE_SHARE = 0.25

#: Edge of the products where the configuration's sizes are meant for another workload: large enough
#: to heat any card.
_SIZE = 8192

#: Optimiser steps that no run of a sweep ends in its time.
_STEPS_MANY = 1_000_000

#: In the order in which they are tried.
_TYPES = ("fp32", "tf32", "fp16", "bf16")

#: A processor runs tf32 as fp32, and fp16 as the fastest type of 16 bits that it has.
_PROCESSOR_TYPES = ("fp32", "fp16")


class Phase(IntEnum):
    """Which of the three."""

    CAPS = 1
    HEAT = 2
    FULL_LOAD = 3

    @property
    def title(self) -> str:
        """In words."""
        return {1: "caps and precision", 2: "heat", 3: "full load"}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """One run of a phase."""

    phase: Phase
    config: Config
    dtype: str | None = None
    """The number type that is tried; `None` where each node keeps its own."""


def number_types(device: str, compute_capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the number types to try on a `cuda` or `cpu` device: those it has units for, all on an
    unknown card.
    """
    if device == "cpu":
        return _PROCESSOR_TYPES
    known = None if compute_capability is None else ARCHITECTURES.get(compute_capability)
    return (
        _TYPES if known is None else tuple(name for name in _TYPES if name in known.multiply_adds)
    )


def takes(
    config: Config, types: Mapping[str, Sequence[str]], heat_s: float, wanted: Collection[Phase]
) -> tuple[Take, ...]:
    """Return the runs of the phases that are wanted, in their order.

    Args:
        config: As loaded.
        types: Of each node, as `number_types` says; other names than the configuration's stand for
        all of its nodes
            (`--local` has a node of its own).
        heat_s: Length of the second phase; the others are never longer.
        wanted: Which phases.
    """
    planned: list[Take] = []
    for dtype in _TYPES if Phase.CAPS in wanted else ():
        able = {node for node, known in types.items() if dtype in known}
        if able:
            planned.append(_precision(config, dtype, able, min(heat_s, _PRECISION_S)))
    if Phase.HEAT in wanted:
        heat = _changed(
            config,
            heat_s,
            workload=_matmul(config),
            nodes=_sized(config),
            compute_share_mode="none",
        )
        planned.append(Take(phase=Phase.HEAT, config=heat))
    if Phase.FULL_LOAD in wanted:
        full = _changed(config, min(heat_s, config.run.duration_s))
        planned.append(Take(phase=Phase.FULL_LOAD, config=full))
    return tuple(planned)


def at_one_value(config: Config, length_s: float) -> tuple[Take, ...]:
    """Return the runs at each value of a sweep: products that are checked, then the training, if
    one is configured.
    """
    checked = _changed(
        config,
        length_s,
        workload=_matmul(config),
        nodes=_sized(config),
        verify={"share": max(config.verify.share, _DENSE_SHARE)},
        compute_share_mode="none",
    )
    planned = [Take(phase=Phase.CAPS, config=checked)]
    if config.workload.name == "train":
        trained = _changed(
            config,
            length_s,
            compute_share_mode="none",
            train={"steps": _STEPS_MANY, "epochs": None},
        )
        planned.append(Take(phase=Phase.FULL_LOAD, config=trained))
    return tuple(planned)


def _precision(config: Config, dtype: str, able: Set[str], length_s: float) -> Take:
    """Return the run of one number type, on the nodes that can do it."""
    sized = _sized(config)
    nodes = {
        name: {**sized[name], "dtype": None}
        for name in sized
        if name in able or able.isdisjoint(sized)
    }
    changed = _changed(
        config,
        length_s,
        workload={**_matmul(config), "dtype": dtype},
        verify={"share": max(config.verify.share, _DENSE_SHARE)},
        cluster={"head": config.cluster.head if config.cluster.head in nodes else None},
        nodes=nodes,
    )
    return Take(phase=Phase.CAPS, config=changed, dtype=dtype)


def _matmul(config: Config) -> dict[str, object]:
    """Return what makes the workload matmul.

    The size and batch of another one mean something else.
    """
    own = (
        {} if config.workload.name == "matmul" else {"size": None, "batch": WorkloadConfig().batch}
    )
    return {"name": "matmul", **own}


def _sized(config: Config) -> dict[str, dict[str, object]]:
    """Return the nodes with sizes for matmul: their own, unless those are meant for another
    workload.
    """
    own = {} if config.workload.name == "matmul" else {"size": _SIZE}
    return {name: {**node, **own} for name, node in config.model_dump()["nodes"].items()}


def _changed(config: Config, length_s: float, **changes: object) -> Config:
    """Return the configuration with other values.

    Those of a section are added to what it has, nodes are replaced.
    """
    data = config.model_dump()
    for key, value in {**changes, "run": {"duration": f"{length_s:.3f}s"}}.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key != "nodes" else value
    return Config.model_validate(data)
