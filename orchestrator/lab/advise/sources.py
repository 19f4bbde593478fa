"""What a change of a key may bring, as a tuning on this card or on its type has measured. Pure.

A tuning holds for one card, driver, torch and model. One that was made with the run's driver and
torch goes before one that was not, then one of this card before one of its type. Does not read
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.lab.advise.facts import CardFacts, RunFacts
from orchestrator.lab.tune.rows import Row, Verdict
from orchestrator.lab.tune.store import Result

#: What says nothing of a gain.
_NOTHING: Final = frozenset({Verdict.BROKEN, Verdict.UNAVAILABLE, Verdict.UNDECIDED})
#: As a tuning names a processor.
_CPU: Final = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Expected speed, of the present one."""

    low: float
    high: float
    source: str


def measured(
    run: RunFacts, card: CardFacts, key: str, value: str, tunings: Sequence[Result]
) -> Gain | None:
    """Return what tunings have measured of a key of `train:` at a value, less what the present
    value brings.
    """
    for result, source in _fitting(run, card, tunings):
        row = _row(result, key, value)
        if row is None or row.speed_low is None or row.speed_high is None:
            continue
        now = _row(result, key, text_of(run.key("train", key)))  # the baseline has no row
        before = 1.0 if now is None else now.speed_ratio or 1.0
        return Gain(low=row.speed_low / before, high=row.speed_high / before, source=source)
    return None


def chosen(run: RunFacts, card: CardFacts, tunings: Sequence[Result]) -> Mapping[str, str]:
    """Return the keys of `train:` that the newest tuning that fits has chosen, where the run has
    them otherwise.
    """
    for result, _ in _fitting(run, card, tunings):
        told = {key: text_of(value) for key, value in result.chosen.items()}
        return {
            key: value for key, value in told.items() if value != text_of(run.key("train", key))
        }
    return MappingProxyType({})


def is_tuned(run: RunFacts, card: CardFacts, tunings: Sequence[Result]) -> bool:
    """Say whether anything was measured of this model on such a card."""
    return next(_fitting(run, card, tunings), None) is not None


def _fitting(
    run: RunFacts, card: CardFacts, tunings: Sequence[Result]
) -> Iterator[tuple[Result, str]]:
    """Yield the tunings of the run's model on such a card, those that fit it best first, and say
    what does not fit.
    """
    ranked = []
    for result in tunings:
        is_here = result.subject.card == (card.uuid or _CPU)
        is_of_type = card.uuid is not None and result.device_name == card.name
        if result.subject.model == run.model and (is_here or is_of_type):
            other = _otherwise(result, card)
            where = "here" if is_here else "on the same card type"
            ranked.append(
                (
                    bool(other),
                    not is_here,
                    result,
                    f"measured {where}{other}, tuning {result.tune_id}",
                )
            )
    for _, _, result, source in sorted(ranked, key=lambda each: each[:2]):
        yield result, source


def _otherwise(result: Result, card: CardFacts) -> str:
    """Return with what other versions than the run's it was measured; empty: with the same."""
    subject = result.subject
    pairs = {"torch": (subject.torch, card.torch), "driver": (subject.driver, card.driver)}
    others = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not others:
        return ""
    had = " and ".join(f"{name} {tuned or 'unknown'}" for name, (tuned, _) in others.items())
    return (
        f" with {had}, this run has "
        f"{' and '.join(now or 'not recorded its own' for _, now in others.values())}"
    )


def _row(result: Result, key: str, value: str) -> Row | None:
    rows = (row for row in result.rows if (row.lever, row.setting) == (key, value))
    return next(
        (row for row in rows if row.verdict not in _NOTHING and row.speed_ratio is not None), None
    )


def text_of(value: object) -> str:
    """Return the value of a key as a tuning names it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
