"""What differs between tuning a training and tuning matmul: baseline, candidates, and what an arm
is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from orchestrator.config.schema import Config
from orchestrator.lab.tune import levers, passes, products
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import MakeSpec
from workers.node_agent import mps
from workers.node_agent.protocol import AgentClient, AgentError, AgentOrders, AgentOutcome
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
    dtype_key: str
    """The key that says in which number type an arm computes."""
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
    recompute: str = "none",
) -> Kind:
    """Return the tuning of `train:`; `choose` picks the candidates that were asked for.

    Where the plain baseline does not fit, `recompute` is `all` in it and in all arms that do not
    say otherwise.
    """
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = {**levers.baseline_of(config.train, on_card=on_card), "recompute": recompute}
    candidates = choose(levers.train_candidates(baseline))
    impossible = {
        each.name: levers.unavailable(each, baseline, on_card=on_card) for each in candidates
    }

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        return ArmSpec(
            name=name,
            spec=replace(
                spec, slot=f"tune/{name}", duty=None, workload=replace(spec.workload, name="train")
            ),
            settings={**baseline, **changes},
            plain=baseline,
            seed=seed + more_seed,
            log=log,
        )

    return Kind(
        model=config.train.preset,
        trains=True,
        dtype_key="precision",
        baseline=baseline,
        candidates=candidates,
        impossible={name: reason for name, reason in impossible.items() if reason is not None},
        yours=passes.your_file(baseline, config.train.model_dump()),
        make_spec=make_spec,
    )


def matmul(
    config: Config,
    spec: WorkerSpec,
    log: Path,
    choose: Callable[[Sequence[Candidate]], Sequence[Candidate]],
    shared: AgentOutcome,
) -> Kind:
    """Return the tuning of matmul on one card, or on the CPU.

    `shared` says where MPS is, or why it is not.
    """
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = products.baseline_of(spec.workload.size)
    candidates = choose(products.candidates(baseline, spec.duty))
    room_bytes = (
        spec.card_budget_bytes if on_card else int(_HOST_SHARE * psutil.virtual_memory().available)
    )

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        keys = {**baseline, **changes}
        workload = replace(
            spec.workload, name=products.WORKLOAD, dtype=keys["dtype"], size=keys["size"]
        )
        own = replace(spec, slot=f"tune/{name}", duty=keys["duty"], workload=workload)
        environment = {}
        if keys["compute_share_mode"] == "mps" and shared.pipe_directory is not None:
            environment = mps.client_environment(shared.pipe_directory, None, None)
        return ArmSpec(name=name, spec=own, seed=seed + more_seed, log=log, environment=environment)

    return Kind(
        model=products.WORKLOAD,
        trains=False,
        dtype_key="dtype",
        baseline=baseline,
        candidates=candidates,
        impossible=products.impossible(
            candidates,
            on_card=on_card,
            mps_obstacle=None
            if shared.pipe_directory is not None
            else shared.mps_problem or "MPS is not on",
            room_bytes=room_bytes,
            budget_bytes=spec.budget_bytes,
        ),
        yours=None,
        make_spec=make_spec,
    )


@contextmanager
def mps_for(tune_id: str, *, on_card: bool) -> Iterator[AgentOutcome]:
    """Have an MPS daemon on this PC for the length of a tuning, as a run has.

    Also a killed one ends it.
    """
    orders = AgentOrders(node="this PC", run_id=tune_id, card_count=1, mps=True)
    if not on_card:
        yield orders.failed("there is no card for MPS to share")
        return
    agent = AgentClient(orders)
    try:
        try:
            outcome = agent.outcome()
        except AgentError as error:
            outcome = orders.failed(str(error))
        yield outcome
    finally:
        agent.end()
