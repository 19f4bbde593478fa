"""From causes to advice: which key to change, what that may bring, who says so, and what to type. Pure.

An expected gain is at most what the run's own counters allow: time that is no longer lost. Does not print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from orchestrator.advise import sources
from orchestrator.advise.causes import CardAnswer, Found
from orchestrator.advise.facts import CardFacts, RunFacts
from orchestrator.advise.shares import Cause
from orchestrator.advise.sources import Known

_RUN: Final = "python -m orchestrator run"
_PROFILE: Final = f"{_RUN} --set train.profile=10"
#: Of the limit that a card has: the lower end of the sweep that is proposed, in whole steps.
_COOLER: Final = 0.6
_STEP_W: Final = 25
#: Who says what a change may bring.
FROM_COUNTERS: Final = "the counters of this run; an upper bound"


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


def advice(run: RunFacts, answers: Sequence[CardAnswer], known: Known) -> tuple[Advice, ...]:
    """Return what to do about the causes of all cards, the largest share of time first, each thing once.

    Then what tunings have found to be faster than what the run had.
    """
    found = sorted((each for answer in answers for each in answer.causes), key=lambda each: -each.share)
    made: dict[tuple[str | None, str], Advice] = {}
    for each in found:
        one = _with_source(_WHAT_TO_DO[each.cause](each, run), run, each.card, known)
        made.setdefault((one.key, one.command), one)
    for answer in answers:
        for one in _of_tunings(run, answer.card, known):
            if one.key not in {other.key for other in made.values()}:
                made[one.key, one.command] = one
    return tuple(made.values())


def notes(run: RunFacts, answers: Iterable[CardAnswer], known: Known) -> tuple[str, ...]:
    """Return what cannot be known from what is there, and what would tell, a sentence each."""
    told = []
    if run.key("workload", "name") == "train":
        told += [
            f"What other settings bring to {run.model} on {answer.card.name} was never measured; type: "
            f"python -m orchestrator tune --preset {run.model}"
            for answer in answers
            if run.model is not None and not sources.is_tuned(run, answer.card, known)
        ]
        if all(slot.profile is None for answer in answers for slot in answer.card.slots):
            told.append(f"Synchronisations only show in a pass of torch.profiler; type: {_PROFILE}")
    return tuple(dict.fromkeys(told))


def _with_source(one: Advice, run: RunFacts, card: CardFacts, known: Known) -> Advice:
    """Return advice on a key of `train:` with what was measured of it, else with what a guide claims of it."""
    section, _, key = (one.key or "").partition(".")
    if section != "train" or one.value is None:
        return one
    measure = f"python -m orchestrator tune --levers {key}"
    gain = sources.measured(run, card, key, one.value, known)
    if gain is not None:
        return replace(one, gain_low=gain.low, gain_high=gain.high, source=gain.source, measure=measure)
    claim = sources.guide(run, key, one.value, known.claims)
    if claim is None:
        return replace(one, measure=measure)
    return replace(one, source=f"{one.source}; guide {claim.seed}, line {claim.line}: {claim.says}", measure=measure)


def _of_tunings(run: RunFacts, card: CardFacts, known: Known) -> Iterator[Advice]:
    """Yield the keys that a tuning has chosen and found faster alone; those chosen for their memory are left out."""
    for key, value in sources.chosen(run, card, known).items():
        gain = sources.measured(run, card, key, value, known)
        if gain is not None and gain.low > 1.0:
            yield Advice(
                text="A tuning has chosen it for this model.",
                key=f"train.{key}",
                value=value,
                gain_low=gain.low,
                gain_high=gain.high,
                source=gain.source,
                command=f"{_RUN} --set train.{key}={value}",
                measure=f"python -m orchestrator tune --levers {key}",
            )


def _loading(found: Found, run: RunFacts) -> Advice:
    workers = run.key("train", "loader_workers", 0)
    if workers == 0:
        text = "Prepare data in processes of their own, while the card computes."
        return _set(found, "train.loader_workers", "auto", text)
    if run.key("train", "ram_cache", default=False) is not True:
        return _set(found, "train.ram_cache", "true", "Keep the data set in RAM, if it fits into half of what is free.")
    if isinstance(workers, int):
        return _set(found, "train.loader_workers", str(2 * workers), "Prepare data in more processes.")
    return _plain(found, "Make samples cheaper: smaller files, decoded once and stored so.", f"{_RUN} --debug")


def _copying(found: Found, run: RunFacts) -> Advice:
    if run.key("train", "non_blocking", default=True) is False:
        return _set(found, "train.non_blocking", "true", "Copy data to the card while it computes.")
    if run.key("train", "pin", "auto") is False:
        return _set(found, "train.pin", "true", "Keep batches in pinned memory, from which copies are fast.")
    return _plain(
        found,
        "Send fewer bytes: small number types that become floats on the card, and larger parts of a batch.",
        _PROFILE,
    )


def _updating(found: Found, run: RunFacts) -> Advice:
    if run.key("train", "states_on_host", 0) not in {0, None}:
        return _set(found, "train.states_on_host", "0", "Keep the optimiser's states on the card, if they fit.")
    if run.key("train", "optimizer", "adamw-fused") != "adamw-fused":
        return _set(found, "train.optimizer", "adamw-fused", "Update all weights in one kernel.")
    batch = run.key("train", "batch", 16)
    larger = str(2 * batch) if isinstance(batch, int) else "32"
    return _set(found, "train.batch", larger, "Update less often: this changes the training itself.")


def _filling(found: Found, run: RunFacts) -> Advice:
    if run.key("workload", "name") == "train" and run.key("train", "compile", "off") == "off":
        return _set(found, "train.compile", "block", "Compile blocks: fewer and larger kernels.")
    return _plain(found, "Give the card more work at once: larger steps.", "python -m orchestrator plan")


def _lacking_memory(found: Found, run: RunFacts) -> Advice:
    del run
    workers = len(found.card.slots) - 1
    if not workers:
        return _plain(found, "Give its worker more memory, or train a smaller model.", "python -m orchestrator plan")
    key = f"nodes.{found.card.node}.workers"
    return _set(found, key, str(workers), "Start fewer workers, and give each more memory.")


def _waiting_for_slices(found: Found, run: RunFacts) -> Advice:
    slice_s = run.key("run", "slice_s", 1.0)
    longer = f"{2 * slice_s:g}" if isinstance(slice_s, int | float) else "2.0"
    return _set(found, "run.slice_s", longer, "Report less often, and plan no more workers than cores.")


def _cooling(found: Found, run: RunFacts) -> Advice:
    del run
    text = "Check dust, airflow and fan curve; then lower its power limit, which costs less than pauses."
    made, limit_w = _plain(found, text, "python -m orchestrator doctor"), found.card.power_limit_w
    if limit_w is None:
        return made
    most = int(limit_w) // _STEP_W * _STEP_W
    sweep = f"power={int(_COOLER * most) // _STEP_W * _STEP_W}..{most}:{_STEP_W}"
    return replace(made, measure=f"sudo .venv/bin/python -m orchestrator burn --local --sweep {sweep}")


def _looking_around(found: Found, run: RunFacts) -> Advice:
    del run
    look = "top" if found.card.uuid is None else "nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS"
    return _plain(found, "Look for other programs and low clocks on that PC.", look)


def _sharing(found: Found, run: RunFacts) -> Advice:
    del run
    return _plain(found, f"End the other program on {found.card.node}, or plan with less of the card.", "nvidia-smi")


def _typing(text: str, command: str) -> Callable[[Found, RunFacts], Advice]:
    """Return advice that changes no key; in the command, `{node}` and `{slots}` are those that it is about."""

    def made(found: Found, run: RunFacts) -> Advice:
        states = {Cause.HELD: "HELD", Cause.QUARANTINED: "QUARANTINED"}
        slots = " ".join(found.slots_in(states.get(found.cause, "")))
        return _plain(found, text, command.format(node=found.card.node, slots=slots, run=run.run_id))

    return made


def _set(found: Found, key: str, value: str, text: str) -> Advice:
    return _with_gain(found, text, f"{_RUN} --set {key}={value}", key, value)


def _plain(found: Found, text: str, command: str) -> Advice:
    return _with_gain(found, text, command)


def _with_gain(found: Found, text: str, command: str, key: str | None = None, value: str | None = None) -> Advice:
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
            _PROFILE,
        ),
        Cause.GAPS: _filling,
        Cause.DUTY: lambda found, _: _set(
            found, f"nodes.{found.card.node}.gpu_share", "1.0", "Let its workers use all of their time."
        ),
        Cause.HEAT: _cooling,
        Cause.NEIGHBOUR: _sharing,
        Cause.SLOW: _looking_around,
        Cause.MEMORY: _lacking_memory,
        Cause.RESTARTS: _typing("See why processes ended.", "python -m orchestrator report {run}"),
        Cause.LOST: _typing(
            "Keep that PC in the cluster: type this there.", "python -m orchestrator up {node} --exec --stay"
        ),
        Cause.HELD: _typing("Let them work again.", "python -m orchestrator resume {slots}"),
        Cause.QUARANTINED: _typing("Read why, then start them again.", "python -m orchestrator reinstate {slots}"),
        Cause.HEAD: _waiting_for_slices,
    }
)
