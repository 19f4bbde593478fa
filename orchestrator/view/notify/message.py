"""Words a message: a title that says enough on a locked phone, what is new, and how the run is.
Pure.

Text from a run may be hostile: it comes out as harmless lines of bounded length. Does not decide
what is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Severity
from orchestrator.record.archive import StoredRun
from orchestrator.record.folders import Deliveries, go_on_command
from orchestrator.record.model import Row, Snapshot, natural_order, rows_by_card
from orchestrator.view.alerts import SEVEREST_FIRST, Firing
from orchestrator.view.cells import clean, shorten
from orchestrator.view.notify.digest import Message, News
from orchestrator.view.phrases import counted, tflops_words, time_words, totals
from workers.units import GIB

_LINES_MOST = 20
"""Of one kind. Some services take only 4,000 characters."""
_CELLS_MOST = 300
_TITLE_CELLS = 120
_SUBJECTS_MOST = 8
_SENSORS = (
    *("temperature_c", "device_used_bytes", "device_total_bytes"),
    *("utilisation_pct", "power_w", "power_limit_w"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageText:
    """A message as it is sent."""

    title: str
    body: str
    severity: Severity


def message_text(
    message: Message,
    run: StoredRun,
    snapshot: Snapshot,
    deliveries: Deliveries,
    unix_s: float,
    missed: Sequence[str] = (),
) -> MessageText:
    """Return the words of a message about a run; of one that has ended, with what it `missed`."""
    news = sorted(message.news, key=lambda one: (not one.is_there, _order(one.firing)))
    new_keys = {one.firing.key for one in news}
    still = sorted((one for one in message.there if one.key not in new_keys), key=_order)
    earlier = [News(firing=one, is_there=True, times=0) for one in still]
    groups = [_headline(group) for group in _grouped(news)]
    essence = groups[:1] if not message.is_last else [_end(run), *groups[:1]]
    more = f", {len(groups) - 1} more" if len(groups) > 1 else ""
    title = "; ".join(essence or [_states(snapshot)]) + more
    blocks = [
        [_end(run), *([] if run.error is None else [run.error]), *_cut(list(missed))]
        if message.is_last
        else [],
        _cut([line for group in _grouped(news) for line in _news_lines(group, unix_s)]),
        _cut(
            [
                f"still: {_headline(group)}, for {_for(group[0].firing, unix_s)}"
                for group in _grouped(earlier)
            ]
        ),
        [*_status(snapshot), *_cut(list(_cards(snapshot.rows))), *_failures(deliveries)],
    ]
    severest = min((_order(one.firing) for one in news if one.is_there), default=(2, "", ()))[0]
    if message.is_last and run.exit_code != 0:
        severest = min(severest, 0 if run.exit_code is None else 1)
    return MessageText(
        title=_line(f"{run.facts.run_id[-4:]}: {title}", _TITLE_CELLS),
        body="\n\n".join(
            "\n".join(_line(line, _CELLS_MOST) for line in block) for block in blocks if block
        ),
        severity=SEVEREST_FIRST[severest],
    )


def _order(one: Firing) -> tuple[int, str, tuple[str | int, ...]]:
    return SEVEREST_FIRST.index(one.alert.severity), one.alert.name, natural_order(one.subject.name)


def _grouped(news: Iterable[News]) -> list[list[News]]:
    """Return the news of one alert about one place together."""
    groups: defaultdict[tuple[bool, str, str], list[News]] = defaultdict(list)
    for one in news:
        groups[one.is_there, one.firing.alert.name, one.firing.subject.place].append(one)
    return list(groups.values())


def _headline(group: Sequence[News]) -> str:
    """Return what is wrong, or no longer wrong, with which subjects."""
    subjects = [one.firing.subject.name for one in group]
    more = f" and {len(subjects) - _SUBJECTS_MOST} more" if len(subjects) > _SUBJECTS_MOST else ""
    over = "" if group[0].is_there else "over: "
    return f"{over}{group[0].firing.alert.name} {' '.join(subjects[:_SUBJECTS_MOST])}{more}"


def _news_lines(group: Sequence[News], unix_s: float) -> Iterator[str]:
    """Yield what is told of some subjects: their names, the text of the first, what to do."""
    first, times = group[0], max(news.times for news in group)
    often = f", {times} times" if times > 1 else ""
    if not first.is_there:
        yield f"{_headline(group)}, after {_for(first.firing, unix_s)}{often}"
        return
    yield f"{first.firing.alert.severity}: {_headline(group)}{often}"
    yield f"  {first.firing.text}"
    if first.firing.alert.what_to_do:
        yield f"  {first.firing.alert.what_to_do}"


def _for(one: Firing, unix_s: float) -> str:
    return format_duration(max(0.0, unix_s - one.since_unix_s))


def _end(run: StoredRun) -> str:
    if run.exit_code is not None:
        return f"the run has ended: {run.outcome}, exit code {run.exit_code}"
    return f"the head is gone; `{go_on_command(run.folder)}` continues the run"


def _states(snapshot: Snapshot) -> str:
    states = ", ".join(f"{count} {state.value}" for state, count in snapshot.state_counts.items())
    return states or "no workers yet"


def _status(snapshot: Snapshot) -> Iterator[str]:
    yield (f"run {snapshot.run_id}: {time_words(snapshot)}, {tflops_words(snapshot.tflops_total)}")
    yield f"{_states(snapshot)}; {', '.join(totals(snapshot))}"
    if snapshot.jobs is not None:
        yield f"jobs: {snapshot.jobs}"
    yield from snapshot.notices


def _cards(rows: Iterable[Row]) -> Iterator[str]:
    """Yield temperature, memory, load and power of each card, as far as they are known."""
    for (node, _), held in rows_by_card(rows).items():
        temperature, used, total, busy, power, limit = (
            next((value for row in held if (value := row.value(key)) is not None), None)
            for key in _SENSORS
        )
        said = [] if temperature is None else [f"{temperature:.0f} C"]
        if used is not None and total is not None:
            said.append(f"{used / GIB:.1f} of {total / GIB:.1f} GiB")
        if busy is not None:
            said.append(f"{busy:.0f} % busy")
        if power is not None:
            said.append(f"{power:.0f} W" if limit is None else f"{power:.0f} of {limit:.0f} W")
        if said:
            yield f"{node} {held[0].gpu_name or 'processor'}: {', '.join(said)}"


def _failures(deliveries: Deliveries) -> Iterator[str]:
    if deliveries.failed:
        yield (
            f"{counted(deliveries.failed, 'delivery', 'deliveries')} of {sum(deliveries)} "
            "failed so far"
        )


def _line(text: str, cells: int) -> str:
    indent = "  " if text.startswith("  ") else ""
    return indent + shorten(clean(text), cells)


def _cut(lines: list[str]) -> list[str]:
    more = [f"and {len(lines) - _LINES_MOST} lines more"] if len(lines) > _LINES_MOST else []
    return [*lines[:_LINES_MOST], *more]
