"""Settings of nodes for the length of a run (MPS, power limits), and what follows for their workers.

Covers the orders for each node, the messages to the user, and the duty that applies where MPS is not on. Does not set
or start anything itself: the agents of `cluster/node_agents.py` do, each by a process of `workers/node_agent/agent.py`
on its node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.errors import PreflightError, UsageError, one_line
from orchestrator.run.environment import Environment, Mode
from workers.node_agent.protocol import AgentOrders, AgentOutcome
from workers.settings import WorkerSpec

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.watch.events import EventLog


@contextlib.contextmanager
def kept(
    environment: Environment,
    fleet: Fleet,
    plans: Sequence[SlotPlan],
    *,
    run_id: str,
    apply_power_limit: bool,
    interrupted: Callable[[], bool],
    tell: Callable[[str], None],
    events: EventLog,
) -> Iterator[tuple[SlotPlan, ...]]:
    """Apply the configured settings on every node that is there, and undo them at the end.

    Yields:
        The slots, with what their workers must know of it.

    Raises:
        UsageError: A power limit is to be set, and none is configured.
        PreflightError: A power limit cannot be set; then none is.
        KeyboardInterrupt: The user wants to stop before all of it is done.
    """
    orders = orders_for(environment, plans, run_id=run_id, apply_power_limit=apply_power_limit)
    live = {fact.name for fact in fleet.nodes()}
    present = {node: each for node, each in orders.items() if node in live}
    for line in left_out(environment, orders, present, apply_power_limit=apply_power_limit):
        tell(line)
    with contextlib.ExitStack() as stack:
        outcomes: Mapping[str, AgentOutcome] = {}
        if present:
            from orchestrator.cluster.node_agents import with_agents  # noqa: PLC0415 - imports ray

            def ended(node: str, sentences: tuple[str, ...]) -> None:
                _told(tell, sentences)
                events.write("node_restored", node=node, text="; ".join(sentences))

            outcomes = stack.enter_context(with_agents(present, ended, interrupted))
        _note(environment.config, orders, outcomes, tell, events)
        problems = [outcome.power_problem for outcome in outcomes.values() if outcome.power_problem is not None]
        if problems:
            raise PreflightError(problems)
        try:
            yield with_outcomes(environment.config, plans, outcomes)
        finally:
            if any(outcome.pipe_directory is not None for outcome in outcomes.values()):
                for plan in plans:
                    fleet.abandon(plan.reservation.slot)  # a daemon ends when it has no clients any more


def orders_for(
    environment: Environment, plans: Sequence[SlotPlan], *, run_id: str, apply_power_limit: bool
) -> dict[str, AgentOrders]:
    """Return the orders of every node that has any. In a rehearsal only fake cards are touched.

    Raises:
        UsageError: A power limit is to be set, and no node has one.
    """
    config = environment.config
    if apply_power_limit and all(node.power_limit_w is None for node in config.nodes.values()):
        name = next(iter(config.nodes))
        raise UsageError(f"--apply-power-limit: no node has one; set it, such as --set nodes.{name}.power_limit_w=250")
    orders = {}
    for name, node in config.nodes.items():
        spec = next(plan.spec for plan in plans if plan.spec.node == name)
        fake = spec.fake_sensors
        has_own_cards = spec.device == "cuda" and environment.mode is not Mode.REHEARSE
        limit_w = node.power_limit_w if apply_power_limit and (has_own_cards or fake is not None) else None
        mps = config.compute_share_mode == "mps" and has_own_cards
        if mps or limit_w is not None:
            orders[name] = AgentOrders(
                node=name,
                run_id=run_id,
                card_count=node.gpus,
                cards=() if fake is None else (str(spec.fake_card),),
                mps=mps,
                power_limit_w=limit_w,
                fake=fake,
            )
    return orders


def left_out(
    environment: Environment,
    orders: Mapping[str, AgentOrders],
    present: Mapping[str, AgentOrders],
    *,
    apply_power_limit: bool,
) -> Iterator[str]:
    """Yield a line for every power limit that is configured and will not be set."""
    for name, node in environment.config.nodes.items():
        if node.power_limit_w is None or not node.gpus:
            continue
        limit = f"{name}: power_limit_w {node.power_limit_w:g} is not set"
        if not apply_power_limit:
            yield f"{limit}; to set it for the length of a run: --apply-power-limit"
        elif name not in orders:
            yield f"{limit}: this run uses no card of that PC"
        elif name not in present:
            yield f"{limit}: {name} has not joined yet"


def with_outcomes(
    config: Config, plans: Sequence[SlotPlan], outcomes: Mapping[str, AgentOutcome]
) -> tuple[SlotPlan, ...]:
    """Return the slots with their workers told of MPS; where it is not on, the same ceiling holds by duty."""
    if config.compute_share_mode != "mps":
        return tuple(plans)
    return tuple(replace(plan, spec=_told_of_mps(config, plan, outcomes.get(plan.spec.node))) for plan in plans)


def _told_of_mps(config: Config, plan: SlotPlan, outcome: AgentOutcome | None) -> WorkerSpec:
    if outcome is None or outcome.pipe_directory is None:
        return replace(plan.spec, thread_share=None, duty=config.nodes[plan.spec.node].gpu_share)
    return replace(plan.spec, mps_pipe_directory=outcome.pipe_directory, mps_memory_limit_bytes=plan.spec.budget_bytes)


def _note(
    config: Config,
    orders: Mapping[str, AgentOrders],
    outcomes: Mapping[str, AgentOutcome],
    tell: Callable[[str], None],
    events: EventLog,
) -> None:
    """Say and write down what became of every node."""
    for name, node in config.nodes.items():
        outcome = outcomes.get(name)
        if outcome is not None:
            _told(tell, outcome.notes)
            events.write(
                "node_kept",
                node=name,
                pipe_directory=outcome.pipe_directory,
                power_limit_w=orders[name].power_limit_w if outcome.power_problem is None else None,
                text="; ".join(outcome.notes),
            )
        if config.compute_share_mode == "mps" and (outcome is None or outcome.pipe_directory is None):
            why = _why_no_mps(name, orders.get(name), outcome)
            tell(one_line(f"{name}: no MPS, {node.gpu_share:.0%} of the time instead (duty): {why}"))
            events.write("mps_unavailable", node=name, reason=why, duty=node.gpu_share)


def _why_no_mps(name: str, orders: AgentOrders | None, outcome: AgentOutcome | None) -> str:
    if orders is None or not orders.mps:
        return "this run uses no card of that PC"
    if outcome is None:
        return f"{name} has not joined yet"
    return outcome.mps_problem or "it was not tried, because the power limit could not be set"


def _told(tell: Callable[[str], None], sentences: Sequence[str]) -> None:
    for sentence in sentences:
        tell(one_line(sentence))
