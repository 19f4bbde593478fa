"""Settings of nodes for the length of a run (MPS, power limits), and what follows for their
workers.

Where MPS is not on, the same ceiling holds by duty. Does not set or start anything itself: the
agents of `cluster/node_tasks.py` do, each by a process of `workers/node_agent/agent.py` on its
node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.config.schema import Config
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.errors import PreflightError, UsageError, one_line
from orchestrator.record.events import EventLog
from orchestrator.run.environment import Environment, Mode
from workers.node_agent.protocol import AgentOrders, AgentOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """What the user wants set on the cards until the run ends."""

    apply_power_limit: bool = False
    """Each node's own `power_limit_w`."""
    power_limit_w: float | None = None
    """On every card, whatever the nodes have; `None` sets none."""
    memory_offset_mhz: int | None = None
    """On every card, as NVML counts it; `None` sets none."""


NO_CARD_SETTINGS = CardSettings()


@contextlib.contextmanager
def hold_settings(
    environment: Environment,
    fleet: Fleet,
    plans: Sequence[SlotPlan],
    *,
    run_id: str,
    cards: CardSettings,
    interrupted: Callable[[], bool],
    tell: Callable[[str], None],
    events: EventLog,
) -> Iterator[tuple[SlotPlan, ...]]:
    """Apply the configured settings on every node that is there, and undo them at the end.

    Yields:
        The slots, with what their workers must know of it.

    Raises:
        UsageError: A power limit is to be set, and none is configured.
        PreflightError: A card cannot be set so; then none is.
        KeyboardInterrupt: The user wants to stop before all of it is done.
    """
    orders = orders_for(environment, plans, run_id=run_id, cards=cards)
    live = {fact.name for fact in fleet.nodes()}
    present = {node: order for node, order in orders.items() if node in live}
    for line in left_out(environment, orders, present, apply_power_limit=cards.apply_power_limit):
        tell(line)
    with contextlib.ExitStack() as stack:
        outcomes: Mapping[str, AgentOutcome] = {}
        if present:
            from orchestrator.cluster.node_tasks import with_agents  # noqa: PLC0415 - imports ray

            def ended(node: str, sentences: tuple[str, ...]) -> None:
                for sentence in sentences:
                    tell(one_line(sentence))
                events.write("node_restored", node=node, text="; ".join(sentences))

            outcomes = stack.enter_context(with_agents(present, ended, interrupted))
        _note(environment.config, orders, outcomes, tell, events)
        problems = [
            outcome.power_problem
            for outcome in outcomes.values()
            if outcome.power_problem is not None
        ]
        if problems:
            raise PreflightError(problems)
        try:
            yield with_outcomes(environment.config, plans, outcomes)
        finally:
            if any(outcome.pipe_directory is not None for outcome in outcomes.values()):
                for plan in plans:
                    fleet.abandon(plan.spec.slot)  # a daemon ends when it has no clients any more


def orders_for(
    environment: Environment, plans: Sequence[SlotPlan], *, run_id: str, cards: CardSettings
) -> dict[str, AgentOrders]:
    """Return the nodes' orders, in a rehearsal for fake cards only.

    `UsageError` if no power limit is configured.
    """
    config = environment.config
    if cards.apply_power_limit and all(
        node.power_limit_w is None for node in config.nodes.values()
    ):
        name = next(iter(config.nodes))
        raise UsageError(
            "--apply-power-limit: no node has one; set it, such as --set "
            f"nodes.{name}.power_limit_w=250"
        )
    orders = {}
    for name, node in config.nodes.items():
        spec = next((plan.spec for plan in plans if plan.spec.node == name), None)
        if spec is None:  # `train.slots` leaves it without a worker
            continue
        fake = spec.fake_sensors
        has_own_cards = spec.device == "cuda" and environment.mode is not Mode.REHEARSE
        can_be_set = has_own_cards or fake is not None
        limit_w = node.power_limit_w if cards.apply_power_limit else cards.power_limit_w
        limit_w = limit_w if can_be_set else None
        offset_mhz = cards.memory_offset_mhz if can_be_set else None
        mps = config.compute_share_mode == "mps" and has_own_cards
        if mps or limit_w is not None or offset_mhz is not None:
            orders[name] = AgentOrders(
                node=name,
                run_id=run_id,
                card_count=node.gpus,
                cards=() if fake is None else (str(spec.fake_card),),
                mps=mps,
                power_limit_w=limit_w,
                memory_offset_mhz=offset_mhz,
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
    """Return the slots with their workers told of MPS.

    Where it is not on, the same ceiling holds by duty.
    """
    if config.compute_share_mode != "mps":
        return tuple(plans)
    changed = []
    for plan in plans:
        spec, outcome = plan.spec, outcomes.get(plan.spec.node)
        if outcome is None or outcome.pipe_directory is None:
            spec = replace(spec, thread_share=None, duty=config.nodes[spec.node].gpu_share)
        else:
            spec = replace(
                spec,
                mps_pipe_directory=outcome.pipe_directory,
                mps_memory_limit_bytes=spec.budget_bytes,
            )
        changed.append(replace(plan, spec=spec))
    return tuple(changed)


def _note(
    config: Config,
    orders: Mapping[str, AgentOrders],
    outcomes: Mapping[str, AgentOutcome],
    tell: Callable[[str], None],
    events: EventLog,
) -> None:
    for name, node in config.nodes.items():
        outcome = outcomes.get(name)
        if outcome is not None:
            for note in outcome.notes:
                tell(one_line(note))
            events.write(
                "node_kept",
                node=name,
                pipe_directory=outcome.pipe_directory,
                power_limit_w=orders[name].power_limit_w if outcome.power_problem is None else None,
                memory_offset_mhz=orders[name].memory_offset_mhz
                if outcome.power_problem is None
                else None,
                text="; ".join(outcome.notes),
            )
        if config.compute_share_mode == "mps" and (
            outcome is None or outcome.pipe_directory is None
        ):
            if name not in orders or not orders[name].mps:
                why = "this run uses no card of that PC"
            elif outcome is None:
                why = f"{name} has not joined yet"
            else:
                why = (
                    outcome.mps_problem
                    or "it was not tried, because the power limit could not be set"
                )
            tell(
                one_line(f"{name}: no MPS, {node.gpu_share:.0%} of the time instead (duty): {why}")
            )
            events.write("mps_unavailable", node=name, reason=why, duty=node.gpu_share)
