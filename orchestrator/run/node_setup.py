"""Chooses which nodes get power limits and memory offsets for the length of a run, and tells the
user.

Sets nothing itself: `cluster/node_tasks.py` runs `workers/card_settings.py` on each node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.errors import UsageError, one_line
from orchestrator.record.events import EventLog
from orchestrator.run.environment import Environment, Mode
from workers.card_settings import WantedSettings


def wanted_settings(
    environment: Environment,
    plans: Sequence[SlotPlan],
    *,
    apply_power_limit: bool,
    yes_really: bool,
    tell: Callable[[str], None],
) -> dict[str, WantedSettings]:
    """Return the settings for the cards of each node; tell the user of each key that is left out.

    A memory offset can make results wrong, so it needs `yes_really` too.

    Raises:
        UsageError: Settings are asked for, and no node has any.
    """
    nodes = environment.config.nodes
    if apply_power_limit and all(
        node.power_limit_w is None and node.memory_offset_mhz is None for node in nodes.values()
    ):
        raise UsageError(
            "--apply-power-limit: no node has one; set it, such as --set "
            f"nodes.{next(iter(nodes))}.power_limit_w=250"
        )
    used = {plan.spec.node for plan in plans if plan.spec.device == "cuda"}
    wanted = {}
    for name, node in nodes.items():
        if not node.gpus:
            continue
        limit_w, offset_mhz = node.power_limit_w, node.memory_offset_mhz
        can_be_set = name in used and environment.mode is not Mode.REHEARSE
        if apply_power_limit and not can_be_set and (limit_w, offset_mhz) != (None, None):
            tell(f"{name}: its cards are left as they are: this run uses no card of that PC")
            continue
        if limit_w is not None and not apply_power_limit:
            tell(f"{name}: power_limit_w {limit_w:g} is not set; to set it: --apply-power-limit")
            limit_w = None
        if offset_mhz is not None and not (apply_power_limit and yes_really):
            tell(
                f"{name}: memory_offset_mhz {offset_mhz} is not set; to set it: "
                "--apply-power-limit --yes-really"
            )
            offset_mhz = None
        if (limit_w, offset_mhz) != (None, None):
            wanted[name] = WantedSettings(
                node=name, cards=node.gpus, power_limit_w=limit_w, memory_offset_mhz=offset_mhz
            )
    return wanted


@contextlib.contextmanager
def cards_set(
    fleet: Fleet,
    wanted: Mapping[str, WantedSettings],
    *,
    tell: Callable[[str], None],
    events: EventLog,
    interrupted: Callable[[], bool],
) -> Iterator[None]:
    """Set the cards of the nodes that have joined until the end of the block, unless the user has
    `interrupted` that.

    Raises:
        PreflightError: A card cannot be set; then no card of its node is set.
    """
    live = {fact.name for fact in fleet.nodes()} if wanted else set()
    for name in wanted.keys() - live:
        tell(f"{name}: its cards are left as they are: it has not joined yet")
    present = {name: settings for name, settings in wanted.items() if name in live}
    if not present:
        yield
        return
    from orchestrator.cluster.node_tasks import with_cards_set  # noqa: PLC0415 - imports ray

    def done(event: str, node: str, lines: tuple[str, ...]) -> None:
        for line in lines:
            tell(one_line(line))
        events.write(event, node=node, text="; ".join(lines))

    with with_cards_set(present, done, interrupted):
        yield
