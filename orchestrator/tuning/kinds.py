"""What differs between tuning a training and tuning matmul: baseline, candidates, and what an arm is told."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import pynvml

from orchestrator.config.schema import Config
from orchestrator.tuning import levers, passes, products
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.measuring import MakeSpec
from workers.node_agent import mps
from workers.nvml import queries
from workers.settings import WorkerSpec
from workers.tuning.messages import ArmSpec

#: Of free RAM, for all workers of an arm.
_HOST_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is tuned."""

    model: str
    """As results are found again by."""
    trains: bool
    """Whether losses are compared."""
    baseline: Mapping[str, Any]
    candidates: Sequence[Candidate]
    impossible: Mapping[str, str]
    """Why some candidates cannot be tried, by name."""
    yours: Candidate | None
    """The user's own settings; `None` where those are the baseline, or nothing is chosen."""
    make_spec: MakeSpec


def training(
    config: Config,
    spec: WorkerSpec,
    log: Path,
    choose: Callable[[Sequence[Candidate]], Sequence[Candidate]],
    *,
    checkpoint: str = "none",
) -> Kind:
    """Return the tuning of `train:`; `choose` picks the candidates that were asked for.

    Where the plain baseline does not fit, `checkpoint` is `all` in it and in all arms that do not say otherwise.
    """
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = {**levers.baseline_of(config.train, on_card=on_card), "checkpoint": checkpoint}
    candidates = choose(levers.train_candidates(baseline))
    impossible = {each.name: levers.unavailable(each, baseline, on_card=on_card) for each in candidates}

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        return ArmSpec(
            name=name,
            spec=replace(spec, slot=f"tune/{name}", duty=None, workload=replace(spec.workload, name="train")),
            settings={**baseline, **changes},
            plain=baseline,
            seed=seed + more_seed,
            log=log,
        )

    return Kind(
        model=config.train.preset,
        trains=True,
        baseline=baseline,
        candidates=candidates,
        impossible={name: reason for name, reason in impossible.items() if reason is not None},
        yours=passes.your_file(baseline, config.train.model_dump()),
        make_spec=make_spec,
    )


def matmul(
    config: Config, spec: WorkerSpec, log: Path, choose: Callable[[Sequence[Candidate]], Sequence[Candidate]]
) -> Kind:
    """Return the tuning of matmul on one card, or on the CPU."""
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = products.baseline_of(spec.workload.size)
    candidates = choose(products.candidates(baseline, spec.duty))
    room_bytes = spec.card_budget_bytes if on_card else int(_HOST_SHARE * psutil.virtual_memory().available)

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        keys = {**baseline, **changes}
        workload = replace(spec.workload, name=products.WORKLOAD, dtype=keys["dtype"], size=keys["size"])
        own = replace(spec, slot=f"tune/{name}", duty=keys["duty"], workload=workload)
        return ArmSpec(name=name, spec=own, seed=seed + more_seed, log=log)

    return Kind(
        model=products.WORKLOAD,
        trains=False,
        baseline=baseline,
        candidates=candidates,
        impossible=products.impossible(
            candidates,
            on_card=on_card,
            mps_obstacle=_mps_obstacle(),
            room_bytes=room_bytes,
            budget_bytes=spec.budget_bytes,
        ),
        yours=None,
        make_spec=make_spec,
    )


def _mps_obstacle() -> str | None:
    try:
        with queries.opened():
            cards = queries.cards()
    except pynvml.NVMLError:
        cards = ()
    return mps.obstacle(system=sys.platform, kernel=platform.release(), cards=cards)
