"""What cluster.yaml says of a node against what the node really has. Pure: facts in, findings out.

Does not cover what the cluster offers to Ray (`placement.refusals`) nor the sums themselves (`budget`).
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.capacity import budget_bytes, card_total_gib, overbooked, workers_per_card
from orchestrator.config.gpu_specs import PROFILES, match_profile
from orchestrator.config.schema import NodeConfig
from orchestrator.doctor.finding import Finding, Verdict, fail, ok, warn
from workers.host.facts import CardFacts, MachineFacts
from workers.units import GIB


def check_plan(node: str, plan: NodeConfig, facts: MachineFacts, *, is_sure: bool) -> Iterator[Finding]:
    """Yield how the plan for a node fits the machine.

    Args:
        node: Its name in cluster.yaml.
        plan: What cluster.yaml says of it.
        facts: Of the machine.
        is_sure: Whether this machine is known to be that node; else what would fail is only a warning.
    """
    found = list(_cards(node, plan, facts) if plan.gpus else _memory(node, plan, facts))
    for finding in found or [ok("plan", _summary(node, plan))]:
        yield finding if is_sure or finding.verdict is not Verdict.FAIL else _softened(finding)


def _summary(node: str, plan: NodeConfig) -> str:
    where = f"{plan.gpus} x {plan.gpu}" if plan.gpus else "the processor"
    return f"{node}: {plan.workers} workers x {plan.vram_per_worker_gib:g} GiB on {where}, which it has"


def _softened(finding: Finding) -> Finding:
    return warn(finding.check, f"{finding.found} (if this PC is meant)", hint=finding.hint, fix=finding.fix)


def _cards(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    has = facts.visible_cards
    if len(has) < plan.gpus:
        cards = "no NVIDIA card answers" if not has else f"{len(has)} answer"
        yield fail(
            "plan",
            f"cluster.yaml gives {node} {plan.gpus} x {plan.gpu}, but {cards} there",
            hint="write down what it has, or let `init` write a new file",
            fix="python -m orchestrator init --output mine.yaml",
        )
    if not has:
        return
    smallest = min(has[: plan.gpus], key=lambda card: card.total_bytes)
    real = plan.model_copy(update={"vram_gib": smallest.total_bytes / GIB})
    excess = overbooked(real)
    if excess is not None:
        yield fail(
            "plan",
            f"{node}: {excess.text}",
            hint=f"in cluster.yaml: {excess.valid}",
            fix="python -m orchestrator init --output mine.yaml",
        )
    yield from _names(node, plan, smallest)
    if excess is None:
        yield from _room(node, plan, has)


def _names(node: str, plan: NodeConfig, card: CardFacts) -> Iterator[Finding]:
    live = match_profile(card.name, card.total_bytes)
    key = None if live is None else live.key
    if plan.gpu in PROFILES and plan.gpu != key:
        total = card_total_gib(plan)
        claimed = "" if total is None else f", for which cluster.yaml says {total:g}"
        yield warn(
            "plan",
            f"cluster.yaml says that {node} has a {plan.gpu}; it has a {card.name} with {card.total_bytes / GIB:.2f} "
            f"GiB{claimed}",
            hint=f"in cluster.yaml: nodes.{node}.gpu: {key or 'any name'}, and "
            f"vram_gib: {int(card.total_bytes / GIB * 100) / 100:g}",
        )


def _room(node: str, plan: NodeConfig, cards: tuple[CardFacts, ...]) -> Iterator[Finding]:
    wanted_bytes = workers_per_card(plan.workers, plan.gpus) * budget_bytes(plan)
    for card in cards[: plan.gpus]:
        foreign = [holder for holder in card.holders if not (holder.name or "").startswith("ray::")]
        if card.used_bytes is None or (card.holders and not foreign):
            continue  # a run is under way, and what is used is used by its workers
        free_bytes = card.total_bytes - card.used_bytes
        if free_bytes < wanted_bytes:
            yield warn(
                "plan",
                f"{node}: its workers want {wanted_bytes / GIB:.2f} GiB of card #{card.index}, and "
                f"{free_bytes / GIB:.2f} GiB are free",
                hint="they run smaller steps; to use all of it, end the other programs on the card",
                fix="nvidia-smi",
            )


def _memory(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    wanted_bytes = plan.workers * budget_bytes(plan)
    if wanted_bytes > facts.ram_available_bytes:
        yield fail(
            "plan",
            f"{node}: {plan.workers} workers x {plan.vram_per_worker_gib:g} GiB on the processor = "
            f"{wanted_bytes / GIB:.2f} GiB, and {facts.ram_available_bytes / GIB:.2f} GiB of memory are free",
            hint=f"in cluster.yaml: fewer workers, or vram_per_worker_gib <= "
            f"{int(facts.ram_available_bytes / plan.workers / GIB * 100) / 100:g}",
        )
    if facts.visible_cards:
        yield warn(
            "plan",
            f"cluster.yaml lets {node} work on its processor, and it has a {facts.visible_cards[0].name}",
            hint="write it down, or let `init` write a new file",
            fix="python -m orchestrator init --output mine.yaml",
        )
