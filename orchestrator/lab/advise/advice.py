"""From causes to advice: which key to change, what that may bring, who says so, and what to type.

An expected gain is at most what the run's own counters allow: time that is no longer lost. A tuning
of the run's model may say more. One that was made with the run's driver and torch goes before one
that was not, then one of this card before one of its type. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.lab.advise.causes import CardAnswer, Cause, CauseShare
from orchestrator.lab.advise.facts import CardHistory, RunHistory
from orchestrator.lab.tune.results import LeverRow, LeverVerdict, TuningResult

#: What a run of this kind is started with, beside its own keys.
_MODES: Final = {mode: f" --{mode}" for mode in ("local", "rehearse")}

#: Of the limit that a card has: the one that is proposed, in whole steps.
_COOLER: Final = 0.8
_STEP_W: Final = 25

#: Who says what a change may bring.
FROM_COUNTERS: Final = "the counters of this run; an upper bound"
FROM_DRIVER: Final = "what the driver of this PC says now"

#: A limit that is lower than the usual one by less than this share is not worth a word.
_LESS_POWER: Final = 0.95

#: What says nothing of a gain.
_NOTHING: Final = frozenset({LeverVerdict.BROKEN, LeverVerdict.UNAVAILABLE, LeverVerdict.UNDECIDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
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
    run: RunHistory, answers: Sequence[CardAnswer], tunings: Sequence[TuningResult]
) -> tuple[Recommendation, ...]:
    """Return what to do about the causes of all cards, the largest share of time first, each thing
    once.

    Then what tunings have found to be faster than what the run had.
    """
    causes = [(cause, answer.card) for answer in answers for cause in answer.causes]
    made: dict[tuple[str | None, str], Recommendation] = {}
    for cause, card in sorted(causes, key=lambda pair: -pair[0].share):
        one = _WHAT_TO_DO[cause.cause](cause, card, run)
        # What a change gains at most is the time that its cause took: 1 / (1 - share).
        most = None if cause.share >= 1 else 1 / (1 - cause.share)
        one = replace(one, cause=cause.cause, gain_low=1.0, gain_high=most)
        one = _as_measured(one, run, card, tunings)
        made.setdefault((one.key, one.command), one)
    for answer in answers:
        for one in _of_tunings(run, answer.card, tunings):
            if one.key not in {other.key for other in made.values()}:
                made[one.key, one.command] = one
        for one in _of_machine(run, answer):
            made.setdefault((one.key, one.command), one)
    return tuple(made.values())


def notes(
    run: RunHistory, answers: Iterable[CardAnswer], tunings: Sequence[TuningResult]
) -> tuple[str, ...]:
    """Return what cannot be known from what is there, and what would tell, a sentence each."""
    if run.key("workload", "name") != "train":
        return ()
    cards, start = [answer.card for answer in answers], _start(run)
    lines = [
        f"What other settings bring to {run.model} on {card.name} was never measured; "
        f"type: {_tune(run)}"
        for card in cards
        if run.model is not None and not any(_fitting(run, card, tunings))
    ]
    if all(slot.profile is None for card in cards for slot in card.slots):
        profile = f"{start} --set train.profile=10"
        lines.append(f"Synchronisations only show in a pass of torch.profiler; type: {profile}")
    lines += [
        f"The {len(card.slots)} workers on {card.name} of {card.node} train a model each, and "
        "share its memory and its time. That is for as many seeds, and makes none of them faster. "
        f"For one with larger steps; type: {start} --set nodes.{card.node}.workers=1"
        for card in cards
        if card.uuid and len(card.slots) > 1
    ]
    return tuple(dict.fromkeys(lines))


def text_of(value: object) -> str:
    """Return the value of a key as a tuning names it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _start(run: RunHistory) -> str:
    """Return what starts a run of this kind again."""
    name = run.key("workload", "name", "matmul")
    workload = "" if name == "matmul" else f" --workload {name}"
    return f"python -m orchestrator run{_MODES.get(run.mode, '')}{workload}"


def _tune(run: RunHistory) -> str:
    """Return what measures the levers of the run's model where the run was."""
    return f"python -m orchestrator tune{_MODES.get(run.mode, '')} --preset {run.model}"


def _of_machine(run: RunHistory, answer: CardAnswer) -> Iterator[Recommendation]:
    """Yield what the driver of this PC says of a card that cost the run speed."""
    card, causes = answer.card, {cause.cause for cause in answer.causes}
    limit_w, usual_w = card.power_limit_w, card.usual_power_limit_w
    node = run.key("nodes", card.node, {})
    is_asked = isinstance(node, Mapping) and node.get("power_limit_w") is not None
    is_low = bool(limit_w and usual_w and limit_w < _LESS_POWER * usual_w)
    if is_low and Cause.HEAT not in causes and not is_asked:
        yield Recommendation(
            text=f"Its power limit is {limit_w:.0f} W, and usually {usual_w:.0f} W: less makes it "
            "cooler and slower.",
            source=FROM_DRIVER,
            command=f"sudo nvidia-smi -i {card.uuid} -pl {usual_w:.0f}",
        )
    lanes, most = card.pcie_lanes, card.most_pcie_lanes
    copies = Cause.COPIES in causes or run.key("train", "states_on_host", 0) != 0
    if lanes and most and lanes < most and copies:
        yield Recommendation(
            text=f"It copies over {lanes} of {most} PCIe lanes: seat it again, or take the slot "
            "next to the processor.",
            source=FROM_DRIVER,
            command=f"nvidia-smi -q -i {card.uuid} | grep -A 12 'Link Width'",
        )


# What tunings have measured


def _as_measured(
    one: Recommendation, run: RunHistory, card: CardHistory, tunings: Sequence[TuningResult]
) -> Recommendation:
    """Return advice on a key of `train:` with what it brought beyond the present value."""
    section, _, key = (one.key or "").partition(".")
    if section != "train" or one.value is None:
        return one
    value, one = one.value, replace(one, measure=f"{_tune(run)} --levers {key}")
    for result, source in _fitting(run, card, tunings):
        row = _row(result, key, value)
        if row is None or row.speed_low is None or row.speed_high is None:
            continue
        now = _row(result, key, text_of(run.key("train", key)))  # the baseline has no row
        before = 1.0 if now is None else now.speed_ratio or 1.0
        low, high = row.speed_low / before, row.speed_high / before
        return replace(one, gain_low=low, gain_high=high, source=source)
    return one


def _of_tunings(
    run: RunHistory, card: CardHistory, tunings: Sequence[TuningResult]
) -> Iterator[Recommendation]:
    """Yield the keys that the tuning that fits best has chosen and found faster alone.

    Those chosen for their memory are left out.
    """
    for result, _ in [*_fitting(run, card, tunings)][:1]:
        for key, setting in result.chosen.items():
            value = text_of(setting)
            if value == text_of(run.key("train", key)):
                continue
            one = Recommendation(
                text="A tuning has chosen it for this model.",
                key=f"train.{key}",
                value=value,
                source="",
                command=f"{_start(run)} --set train.{key}={value}",
            )
            one = _as_measured(one, run, card, tunings)
            if one.gain_low is not None and one.gain_low > 1.0:
                yield one


def _fitting(
    run: RunHistory, card: CardHistory, tunings: Sequence[TuningResult]
) -> Iterator[tuple[TuningResult, str]]:
    """Yield the tunings of the run's model on such a card, best first, and how each one fits."""
    ranked = []
    for result in tunings:
        is_here = result.subject.card == (card.uuid or "cpu")
        is_of_type = card.uuid is not None and result.device_name == card.name
        if result.subject.model == run.model and (is_here or is_of_type):
            other = _other_versions(result, card)
            where = "here" if is_here else "on the same card type"
            source = f"measured {where}{other}, tuning {result.tune_id}"
            ranked.append((bool(other), not is_here, result, source))
    for _, _, result, source in sorted(ranked, key=lambda each: each[:2]):
        yield result, source


def _other_versions(result: TuningResult, card: CardHistory) -> str:
    """Return with what other versions than the run's it was measured; empty: with the same."""
    subject = result.subject
    pairs = {"torch": (subject.torch, card.torch), "driver": (subject.driver, card.driver)}
    others = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not others:
        return ""
    had = " and ".join(f"{name} {tuned or 'unknown'}" for name, (tuned, _) in others.items())
    has = " and ".join(now or "not recorded its own" for _, now in others.values())
    return f" with {had}, this run has {has}"


def _row(result: TuningResult, key: str, value: str) -> LeverRow | None:
    rows = (row for row in result.rows if (row.lever, row.setting) == (key, value))
    return next(
        (row for row in rows if row.verdict not in _NOTHING and row.speed_ratio is not None), None
    )


# What to do about each cause

_Adviser = Callable[[CauseShare, CardHistory, RunHistory], Recommendation]


def _set(run: RunHistory, key: str, value: str, text: str) -> Recommendation:
    command = f"{_start(run)} --set {key}={value}"
    return Recommendation(text=text, key=key, value=value, source=FROM_COUNTERS, command=command)


def _plain(text: str, command: str) -> Recommendation:
    return Recommendation(text=text, source=FROM_COUNTERS, command=command)


def _typing(text: str, command: str) -> _Adviser:
    """Return advice that changes no key.

    In the command, `{node}`, `{slots}` and so on are filled in.
    """

    def made(cause: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
        fields = {"node": card.node, "run": run.run_id, "start": _start(run)}
        return _plain(text, command.format(slots=" ".join(cause.slots), **fields))

    return made


def _loading(_: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
    workers = run.key("train", "loader_workers", 0)
    if workers == 0:
        text = "Prepare data in processes of their own, while the card computes."
        return _set(run, "train.loader_workers", "auto", text)
    if run.key("train", "ram_cache", default=False) is not True:
        text = "Keep the data set in RAM, if it fits into half of what is free."
        return _set(run, "train.ram_cache", "true", text)
    cores = None if card.cores is None else card.cores / len(card.slots)
    if isinstance(workers, int) and (cores is None or workers < cores - 1):
        text = "Prepare data in more processes."
        return _set(run, "train.loader_workers", str(2 * workers), text)
    text = "Make samples cheaper: smaller files, decoded once and stored so."
    if cores is not None:
        text += f" A worker has {cores:.1f} cores of this PC: more processes would not help."
    return _plain(text, f"{_start(run)} --set train.profile=10")


def _copying(_: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
    if run.key("train", "non_blocking", default=True) is False:
        text = "Copy data to the card while it computes."
        return _set(run, "train.non_blocking", "true", text)
    if run.key("train", "pin", "auto") is False and not card.is_wsl:
        text = "Keep batches in pinned memory, from which copies are fast."
        return _set(run, "train.pin", "true", text)
    text = (
        "Send fewer bytes: small number types that become floats on the card, and larger parts "
        "of a batch."
    )
    if card.is_wsl:
        text += " Copies wait, because this PC runs WSL2, where little memory can be pinned."
    return _plain(text, f"{_start(run)} --set train.profile=10")


def _updating(_: CauseShare, __: CardHistory, run: RunHistory) -> Recommendation:
    if run.key("train", "states_on_host", 0) not in {0, None}:
        text = "Keep the optimiser's states on the card, if they fit."
        return _set(run, "train.states_on_host", "0", text)
    if run.key("train", "optimizer", "adamw-fused") != "adamw-fused":
        text = "Update all weights in one kernel."
        return _set(run, "train.optimizer", "adamw-fused", text)
    batch = run.key("train", "batch", 16)
    larger = str(2 * batch) if isinstance(batch, int) else "32"
    text = "Update less often: this changes the training itself."
    return _set(run, "train.batch", larger, text)


def _filling(_: CauseShare, __: CardHistory, run: RunHistory) -> Recommendation:
    if run.key("workload", "name") == "train" and run.key("train", "compile", "off") == "off":
        text = "Compile blocks: fewer and larger kernels."
        return _set(run, "train.compile", "block", text)
    text = "Give the card more work at once: larger steps."
    return _plain(text, "python -m orchestrator plan")


def _lacking_memory(_: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
    workers = len(card.slots) - 1
    if not workers:
        text = "Give its worker more memory, or train a smaller model."
        return _plain(text, "python -m orchestrator plan")
    text = "Start fewer workers, and give each more memory."
    return _set(run, f"nodes.{card.node}.workers", str(workers), text)


def _waiting_for_slices(_: CauseShare, __: CardHistory, run: RunHistory) -> Recommendation:
    slice_s = run.key("run", "slice_s", 1.0)
    longer = f"{2 * slice_s:g}" if isinstance(slice_s, int | float) else "2.0"
    text = "Report less often, and plan no more workers than cores."
    return _set(run, "run.slice_s", longer, text)


def _resting(_: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
    text = "Let its workers use all of their time."
    return _set(run, f"nodes.{card.node}.gpu_share", "1.0", text)


def _cooling(_: CauseShare, card: CardHistory, run: RunHistory) -> Recommendation:
    text = (
        "Check dust, airflow and fan curve; then lower its power limit, which costs less than "
        "pauses."
    )
    if card.power_limit_w is None:
        return _plain(text, "python -m orchestrator doctor")
    limit_w = int(_COOLER * card.power_limit_w) // _STEP_W * _STEP_W
    lower = f"--apply-power-limit --set nodes.{card.node}.power_limit_w={limit_w}"
    return _plain(text, f"{_start(run)} {lower}")


def _looking_around(_: CauseShare, card: CardHistory, __: RunHistory) -> Recommendation:
    look = "top" if card.uuid is None else "nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS"
    return _plain("Look for other programs and low clocks on that PC.", look)


_WHAT_TO_DO: Final[Mapping[Cause, _Adviser]] = {
    Cause.DATA: _loading,
    Cause.COPIES: _copying,
    Cause.OPTIMIZER: _updating,
    Cause.SYNCHRONISATIONS: _typing(
        "Read values of the card less often: a loss, an .item(), a print in your own task.",
        "{start} --set train.profile=10",
    ),
    Cause.GAPS: _filling,
    Cause.DUTY: _resting,
    Cause.HEAT: _cooling,
    Cause.NEIGHBOUR: lambda _, card, __: _plain(
        f"End the other program on {card.node}, or plan with less of the card.", "nvidia-smi"
    ),
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
