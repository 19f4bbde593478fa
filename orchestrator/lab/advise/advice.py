"""From causes to advice: which key to change, what that may bring, who says so, and what to type.
Pure.

An expected gain is at most what the run's own counters allow: time that is no longer lost. Does not
print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from orchestrator.lab.advise import sources
from orchestrator.lab.advise.causes import CardAnswer, Found
from orchestrator.lab.advise.facts import CardFacts, RunFacts
from orchestrator.lab.advise.shares import Cause
from orchestrator.lab.tune.store import Result

#: What a run of this kind is started with, beside its own keys.
_MODES: Final[Mapping[str, str]] = MappingProxyType(
    {mode: f" --{mode}" for mode in ("local", "rehearse", "debug")}
)
#: Of the limit that a card has: the lower end of the sweep that is proposed, in whole steps.
_COOLER: Final = 0.6
_STEP_W: Final = 25
#: Who says what a change may bring.
FROM_COUNTERS: Final = "the counters of this run; an upper bound"
FROM_DRIVER: Final = "what the driver of this PC says now"
#: A limit that is lower than the usual one by less than this share is not worth a word.
_LESS_POWER: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do."""

    text: str
    """One sentence."""
    cause: Cause | None = None
    """`None`: it is not about a loss of time, but a gain that was measured elsewhere."""
    key: str | None = None
    """Of cluster.yaml, such as `train.loader_workers`; `None`: no key does it."""
    value: str | None = None
    """What to set it to, as YAML."""
    gain_low: float | None = None
    """Expected speed, of the present one."""
    gain_high: float | None = None
    source: str
    command: str
    """Does it, or says more."""
    measure: str | None = None
    """Measures what it brings; `None` where no command does."""


def advice(
    run: RunFacts, answers: Sequence[CardAnswer], tunings: Sequence[Result]
) -> tuple[Advice, ...]:
    """Return what to do about the causes of all cards, the largest share of time first, each thing
    once.

    Then what tunings have found to be faster than what the run had.
    """
    found = sorted(
        (each for answer in answers for each in answer.causes), key=lambda each: -each.share
    )
    made: dict[tuple[str | None, str], Advice] = {}
    for each in found:
        one = _with_source(_WHAT_TO_DO[each.cause](each, run), run, each.card, tunings)
        made.setdefault((one.key, one.command), one)
    for answer in answers:
        for one in _of_tunings(run, answer.card, tunings):
            if one.key not in {other.key for other in made.values()}:
                made[one.key, one.command] = one
        for one in _of_machine(run, answer):
            made.setdefault((one.key, one.command), one)
    return tuple(made.values())


def notes(
    run: RunFacts, answers: Iterable[CardAnswer], tunings: Sequence[Result]
) -> tuple[str, ...]:
    """Return what cannot be known from what is there, and what would tell, a sentence each."""
    told = []
    if run.key("workload", "name") == "train":
        told += [
            f"What other settings bring to {run.model} on {answer.card.name} was never measured; "
            f"type: {_tune(run)}"
            for answer in answers
            if run.model is not None and not sources.is_tuned(run, answer.card, tunings)
        ]
        if all(slot.profile is None for answer in answers for slot in answer.card.slots):
            told.append(
                f"Synchronisations only show in a pass of torch.profiler; type: {_profile(run)}"
            )
        told += [
            _crowded(answer.card, run)
            for answer in answers
            if answer.card.uuid and len(answer.card.slots) > 1
        ]
    return tuple(dict.fromkeys(told))


def _crowded(card: CardFacts, run: RunFacts) -> str:
    return (
        f"The {len(card.slots)} workers on {card.name} of {card.node} train a model each, and "
        "share its memory and its "
        "time. That is for as many seeds, and makes none of them faster. For one with larger "
        "steps; type: "
        f"{_start(run)} --set nodes.{card.node}.workers=1"
    )


def _start(run: RunFacts) -> str:
    """Return what starts a run of this kind again."""
    name = run.key("workload", "name", "matmul")
    workload = "" if name == "matmul" else f" --workload {name}"
    return f"python -m orchestrator run{_MODES.get(run.mode, '')}{workload}"


def _profile(run: RunFacts) -> str:
    return f"{_start(run)} --set train.profile=10"


def _tune(run: RunFacts) -> str:
    """Return what measures the levers of the run's model where the run was."""
    mode = _MODES.get(run.mode, "") if run.mode != "debug" else " --local"
    return f"python -m orchestrator tune{mode} --preset {run.model}"


def _of_machine(run: RunFacts, answer: CardAnswer) -> Iterator[Advice]:
    """Yield what the driver of this PC says of a card that cost the run speed, whatever its
    counters say.
    """
    card, causes = answer.card, {found.cause for found in answer.causes}
    limit_w, usual_w = card.power_limit_w, card.usual_power_limit_w
    node = run.key("nodes", card.node, {})
    is_asked = isinstance(node, Mapping) and node.get("power_limit_w") is not None
    if (
        limit_w
        and usual_w
        and limit_w < _LESS_POWER * usual_w
        and Cause.HEAT not in causes
        and not is_asked
    ):
        text = (
            f"Its power limit is {limit_w:.0f} W, and usually {usual_w:.0f} W: less makes it "
            "cooler and slower."
        )
        yield Advice(
            text=text,
            source=FROM_DRIVER,
            command=f"sudo nvidia-smi -i {card.uuid} -pl {usual_w:.0f}",
        )
    lanes, most = card.pcie_lanes, card.most_pcie_lanes
    copies = Cause.COPIES in causes or run.key("train", "states_on_host", 0) != 0
    if lanes and most and lanes < most and copies:
        text = (
            f"It copies over {lanes} of {most} PCIe lanes: seat it again, or take the slot "
            "next to the processor."
        )
        yield Advice(
            text=text,
            source=FROM_DRIVER,
            command=f"nvidia-smi -q -i {card.uuid} | grep -A 12 'Link Width'",
        )


def _with_source(one: Advice, run: RunFacts, card: CardFacts, tunings: Sequence[Result]) -> Advice:
    """Return advice on a key of `train:` with what was measured of it."""
    section, _, key = (one.key or "").partition(".")
    if section != "train" or one.value is None:
        return one
    measure = f"{_tune(run)} --levers {key}"
    gain = sources.measured(run, card, key, one.value, tunings)
    if gain is not None:
        return replace(
            one, gain_low=gain.low, gain_high=gain.high, source=gain.source, measure=measure
        )
    return replace(one, measure=measure)


def _of_tunings(run: RunFacts, card: CardFacts, tunings: Sequence[Result]) -> Iterator[Advice]:
    """Yield the keys that a tuning has chosen and found faster alone.

    Those chosen for their memory are left out.
    """
    for key, value in sources.chosen(run, card, tunings).items():
        gain = sources.measured(run, card, key, value, tunings)
        if gain is not None and gain.low > 1.0:
            yield Advice(
                text="A tuning has chosen it for this model.",
                key=f"train.{key}",
                value=value,
                gain_low=gain.low,
                gain_high=gain.high,
                source=gain.source,
                command=f"{_start(run)} --set train.{key}={value}",
                measure=f"{_tune(run)} --levers {key}",
            )


def _loading(found: Found, run: RunFacts) -> Advice:
    workers = run.key("train", "loader_workers", 0)
    if workers == 0:
        text = "Prepare data in processes of their own, while the card computes."
        return _set(found, run, "train.loader_workers", "auto", text)
    if run.key("train", "ram_cache", default=False) is not True:
        text = "Keep the data set in RAM, if it fits into half of what is free."
        return _set(found, run, "train.ram_cache", "true", text)
    cores = None if found.card.cores is None else found.card.cores / len(found.card.slots)
    if isinstance(workers, int) and (cores is None or workers < cores - 1):
        return _set(
            found, run, "train.loader_workers", str(2 * workers), "Prepare data in more processes."
        )
    few = (
        ""
        if cores is None
        else f" A worker has {cores:.1f} cores of this PC: more processes would not help."
    )
    text = f"Make samples cheaper: smaller files, decoded once and stored so.{few}"
    return _plain(found, text, f"{_start(run)} --debug")


def _copying(found: Found, run: RunFacts) -> Advice:
    if run.key("train", "non_blocking", default=True) is False:
        return _set(
            found, run, "train.non_blocking", "true", "Copy data to the card while it computes."
        )
    if run.key("train", "pin", "auto") is False and not found.card.is_wsl:
        return _set(
            found,
            run,
            "train.pin",
            "true",
            "Keep batches in pinned memory, from which copies are fast.",
        )
    slow = (
        " Copies wait, because this PC runs WSL2, where little memory can be pinned."
        if found.card.is_wsl
        else ""
    )
    text = (
        "Send fewer bytes: small number types that become floats on the card, and larger parts "
        "of a batch."
    )
    return _plain(found, f"{text}{slow}", _profile(run))


def _updating(found: Found, run: RunFacts) -> Advice:
    if run.key("train", "states_on_host", 0) not in {0, None}:
        return _set(
            found,
            run,
            "train.states_on_host",
            "0",
            "Keep the optimiser's states on the card, if they fit.",
        )
    if run.key("train", "optimizer", "adamw-fused") != "adamw-fused":
        return _set(
            found, run, "train.optimizer", "adamw-fused", "Update all weights in one kernel."
        )
    batch = run.key("train", "batch", 16)
    larger = str(2 * batch) if isinstance(batch, int) else "32"
    return _set(
        found, run, "train.batch", larger, "Update less often: this changes the training itself."
    )


def _filling(found: Found, run: RunFacts) -> Advice:
    if run.key("workload", "name") == "train" and run.key("train", "compile", "off") == "off":
        return _set(
            found, run, "train.compile", "block", "Compile blocks: fewer and larger kernels."
        )
    return _plain(
        found, "Give the card more work at once: larger steps.", "python -m orchestrator plan"
    )


def _lacking_memory(found: Found, run: RunFacts) -> Advice:
    workers = len(found.card.slots) - 1
    if not workers:
        return _plain(
            found,
            "Give its worker more memory, or train a smaller model.",
            "python -m orchestrator plan",
        )
    key = f"nodes.{found.card.node}.workers"
    return _set(found, run, key, str(workers), "Start fewer workers, and give each more memory.")


def _waiting_for_slices(found: Found, run: RunFacts) -> Advice:
    slice_s = run.key("run", "slice_s", 1.0)
    longer = f"{2 * slice_s:g}" if isinstance(slice_s, int | float) else "2.0"
    return _set(
        found, run, "run.slice_s", longer, "Report less often, and plan no more workers than cores."
    )


def _cooling(found: Found, run: RunFacts) -> Advice:
    del run
    text = (
        "Check dust, airflow and fan curve; then lower its power limit, which costs less than "
        "pauses."
    )
    made, limit_w = _plain(found, text, "python -m orchestrator doctor"), found.card.power_limit_w
    if limit_w is None:
        return made
    most = int(limit_w) // _STEP_W * _STEP_W
    sweep = f"power={int(_COOLER * most) // _STEP_W * _STEP_W}..{most}:{_STEP_W}"
    return replace(
        made, measure=f"sudo .venv/bin/python -m orchestrator burn --local --sweep {sweep}"
    )


def _looking_around(found: Found, run: RunFacts) -> Advice:
    del run
    look = "top" if found.card.uuid is None else "nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS"
    return _plain(found, "Look for other programs and low clocks on that PC.", look)


def _sharing(found: Found, run: RunFacts) -> Advice:
    del run
    return _plain(
        found,
        f"End the other program on {found.card.node}, or plan with less of the card.",
        "nvidia-smi",
    )


def _typing(text: str, command: str) -> Callable[[Found, RunFacts], Advice]:
    """Return advice that changes no key.

    In the command, `{node}`, `{slots}` and so on are filled in.
    """

    def made(found: Found, run: RunFacts) -> Advice:
        states = {Cause.HELD: "HELD", Cause.QUARANTINED: "QUARANTINED"}
        slots = " ".join(found.slots_in(states.get(found.cause, "")))
        return _plain(
            found,
            text,
            command.format(node=found.card.node, slots=slots, run=run.run_id, start=_start(run)),
        )

    return made


def _set(found: Found, run: RunFacts, key: str, value: str, text: str) -> Advice:
    return _with_gain(found, text, f"{_start(run)} --set {key}={value}", key, value)


def _plain(found: Found, text: str, command: str) -> Advice:
    return _with_gain(found, text, command)


def _with_gain(
    found: Found, text: str, command: str, key: str | None = None, value: str | None = None
) -> Advice:
    """Return advice that gains at most the time that its cause took: 1 / (1 - share)."""
    most = None if found.share >= 1 else 1 / (1 - found.share)
    return Advice(
        text=text,
        cause=found.cause,
        key=key,
        value=value,
        gain_low=1.0,
        gain_high=most,
        source=FROM_COUNTERS,
        command=command,
    )


_WHAT_TO_DO: Final[Mapping[Cause, Callable[[Found, RunFacts], Advice]]] = MappingProxyType(
    {
        Cause.DATA: _loading,
        Cause.COPIES: _copying,
        Cause.OPTIMIZER: _updating,
        Cause.SYNCHRONISATIONS: _typing(
            "Read values of the card less often: a loss, an .item(), a print in your own task.",
            "{start} --set train.profile=10",
        ),
        Cause.GAPS: _filling,
        Cause.DUTY: lambda found, run: _set(
            found,
            run,
            f"nodes.{found.card.node}.gpu_share",
            "1.0",
            "Let its workers use all of their time.",
        ),
        Cause.HEAT: _cooling,
        Cause.NEIGHBOUR: _sharing,
        Cause.SLOW: _looking_around,
        Cause.MEMORY: _lacking_memory,
        Cause.RESTARTS: _typing("See why processes ended.", "python -m orchestrator report {run}"),
        Cause.LOST: _typing(
            "Keep that PC in the cluster: type this there.",
            "python -m orchestrator up {node} --exec --stay",
        ),
        Cause.HELD: _typing("Let them work again.", "python -m orchestrator unpause {slots}"),
        Cause.QUARANTINED: _typing(
            "Read why, then start them again.", "python -m orchestrator reinstate {slots}"
        ),
        Cause.HEAD: _waiting_for_slices,
    }
)
