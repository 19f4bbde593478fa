"""What cluster.yaml says against what nodes have, and the nodes against each other. Pure: facts in,
findings out.

Does not cover what the cluster offers to Ray (`placement.refusals`) nor the sums themselves
(`budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from orchestrator.config.capacity import budget_bytes, card_total_gib, overbooked, workers_per_card
from orchestrator.config.gpu_specs import PROFILES, match_profile
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.core.fleet import NodeAnswer
from orchestrator.core.node_commands import node_command
from orchestrator.core.placement import Refusal
from orchestrator.doctor.checks_card import is_ours
from orchestrator.doctor.finding import Finding, Verdict, fail, named, ok, skip, warn
from orchestrator.view.phrases import counted
from workers.host.facts import CardFacts, MachineFacts
from workers.units import GIB

#: A run measures with the head's clock alone; more than this only makes the PCs' own logs hard to
#: compare.
_CLOCK_OFFSET_S = 1.0

_NEW_FILE = "python -m orchestrator init --output mine.yaml"


def check_nodes(
    config: Config, address: str, missing: Sequence[Refusal], answers: Sequence[NodeAnswer]
) -> list[Finding]:
    """Return what there is to say about the nodes of a running cluster, apart from each machine
    itself.

    Args:
        config: What is planned.
        address: `host:port` of the head.
        missing: As `placement.refusals` says.
        answers: One for each live node.
    """
    found = [
        replace(
            fail(
                refusal.text,
                hint=f"on {refusal.node}",
                fix=node_command(config, refusal.node, address).line,
            ),
            check="nodes",
            node=refusal.node,
        )
        for refusal in missing
    ]
    if not found:
        words = (
            f"{counted(len(config.nodes), 'planned node')} there, with the CPUs and GPUs planned"
        )
        found = named({"nodes": ok(words)})
    for answer in answers:
        found += [replace(finding, node=answer.title) for finding in named(_of_one(config, answer))]
    return [*found, *named({"versions": _alike(answers)})]


def _of_one(config: Config, answer: NodeAnswer) -> dict[str, Finding | Iterable[Finding]]:
    if answer.facts is None:
        text = f"gave no answer: {answer.error or 'no reason given'}"
        hint = (
            "is this project installed there, in the same version, in the Python that Ray was "
            "started with?"
        )
        return {"nodes": _label(config, answer), "answer": fail(text, hint=hint, fix="make setup")}
    return {"nodes": _label(config, answer), "clock": _clock(answer), "network": _doors(answer)}


def _label(config: Config, answer: NodeAnswer) -> Iterator[Finding]:
    if answer.name is None:
        names = ", ".join(config.nodes)
        yield warn(
            f"the node at {answer.address} has no label, so no worker is placed on it",
            hint="end its Ray there (ray stop) and start it with what `up` prints for one of: "
            f"{names}",
            fix=f"python -m orchestrator up {next(iter(config.nodes))}",
        )
    elif answer.name not in config.nodes:
        yield warn(f"cluster.yaml has no node {answer.name}, so no worker is placed on it")


def _clock(answer: NodeAnswer) -> Finding:
    offset_s, error_s = answer.clock_offset_s, answer.clock_error_s
    if offset_s is None or error_s is None:
        return skip("could not be compared")
    found = (
        f"{abs(offset_s):.3f} s {'ahead of' if offset_s >= 0 else 'behind'} this PC's, give "
        f"or take {error_s:.3f} s"
    )
    if abs(offset_s) - error_s > _CLOCK_OFFSET_S:
        return warn(found, hint="on the PC that is wrong", fix="sudo timedatectl set-ntp true")
    return ok(found)


def _doors(answer: NodeAnswer) -> Finding:
    if not answer.unreachable:
        return ok("reaches every other node")
    shut = ", ".join(answer.unreachable)
    return fail(
        f"cannot reach {shut}; a firewall, or an address that only the other side can use",
        hint="on the PC that is not reached, let the others in (this is ufw's way; put your "
        "network's address); a PC "
        "with several networks needs nodes.<name>.host",
        fix="sudo ufw allow from 192.168.0.0/16",
    )


def _alike(answers: Iterable[NodeAnswer]) -> Iterator[Finding]:
    """Yield where nodes differ in what must or should be the same."""
    known = [(answer.title, answer.facts) for answer in answers if answer.facts is not None]
    if len(known) < 2:
        return
    versions: dict[str, Callable[[MachineFacts], str | None]] = {
        "Python": lambda facts: ".".join(facts.python.split(".")[:2]),
        "Ray": lambda facts: facts.ray,
        "this project": lambda facts: facts.project,
        "torch": lambda facts: (facts.torch.version or "none").split("+")[0],
    }
    differing = False
    for what, version in versions.items():
        if len({version(facts) for _, facts in known}) > 1:
            differing = True
            has = ", ".join(f"{title} has {version(facts) or 'none'}" for title, facts in known)
            yield (warn if what == "torch" else fail)(f"{what} differs: {has}", fix="make setup")
    if not differing:
        yield ok("Python, Ray, torch and this project are the same on every node")


def check_plan(
    node: str, plan: NodeConfig, facts: MachineFacts, *, is_sure: bool
) -> Iterator[Finding]:
    """Yield how the plan for a node fits a machine.

    What would fail is only a warning unless it `is_sure` that node.
    """
    where = f"{plan.gpus} x {plan.gpu}" if plan.gpus else "the processor"
    fits = ok(
        f"{node}: {plan.workers} workers x {plan.vram_per_worker_gib:g} GiB on {where}, which it "
        "has"
    )
    for finding in list(_cards(node, plan, facts) if plan.gpus else _memory(node, plan, facts)) or [
        fits
    ]:
        if finding.verdict is Verdict.FAIL and not is_sure:
            yield replace(
                finding, verdict=Verdict.WARN, found=f"{finding.found} (if this PC is meant)"
            )
        else:
            yield finding


def _cards(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    has = facts.visible_cards
    if len(has) < plan.gpus:
        cards = "no NVIDIA card answers" if not has else f"{len(has)} answer"
        yield fail(
            f"cluster.yaml gives {node} {plan.gpus} x {plan.gpu}, but {cards} there",
            hint="write down what it has, or let `init` write a new file",
            fix=_NEW_FILE,
        )
    if not has:
        return
    smallest = min(has[: plan.gpus], key=lambda card: card.total_bytes)
    real = plan.model_copy(update={"vram_gib": smallest.total_bytes / GIB})
    excess = overbooked(real)
    if excess is not None:
        yield fail(
            f"{node}: {excess.text}",
            hint=f"in cluster.yaml: {excess.valid}",
            fix=_NEW_FILE,
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
            f"cluster.yaml says that {node} has a {plan.gpu}; it has a {card.name} with "
            f"{card.total_bytes / GIB:.2f} "
            f"GiB{claimed}",
            hint=f"in cluster.yaml: nodes.{node}.gpu: {key or 'any name'}, and "
            f"vram_gib: {int(card.total_bytes / GIB * 100) / 100:g}",
        )


def _room(node: str, plan: NodeConfig, cards: tuple[CardFacts, ...]) -> Iterator[Finding]:
    wanted_bytes = workers_per_card(plan.workers, plan.gpus) * budget_bytes(plan)
    for card in cards[: plan.gpus]:
        if card.used_bytes is None or is_ours(card.holders):
            continue  # a run is under way, and what is used is used by its workers
        free_bytes = card.total_bytes - card.used_bytes
        if free_bytes < wanted_bytes:
            yield warn(
                f"{node}: its workers want {wanted_bytes / GIB:.2f} GiB of card #{card.index}, and "
                f"{free_bytes / GIB:.2f} GiB are free",
                hint="they run smaller steps; to use all of it, end the other programs on the card",
                fix="nvidia-smi",
            )


def _memory(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    wanted_bytes = plan.workers * budget_bytes(plan)
    if wanted_bytes > facts.ram_available_bytes:
        yield fail(
            f"{node}: {plan.workers} workers x {plan.vram_per_worker_gib:g} GiB on the processor = "
            f"{wanted_bytes / GIB:.2f} GiB, and {facts.ram_available_bytes / GIB:.2f} GiB of "
            "memory are free",
            hint=f"in cluster.yaml: fewer workers, or vram_per_worker_gib <= "
            f"{int(facts.ram_available_bytes / plan.workers / GIB * 100) / 100:g}",
        )
    if facts.visible_cards:
        yield warn(
            f"cluster.yaml lets {node} work on its processor, and it has a "
            f"{facts.visible_cards[0].name}",
            hint="write it down, or let `init` write a new file",
            fix=_NEW_FILE,
        )
