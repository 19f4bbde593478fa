"""Sums of a run in words, shared by the table and the plain lines.

Pure. Does not cover the table's cells, nor outcome and exit code: those are the head's to say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from orchestrator.config.duration import format_duration
from orchestrator.record.archive import StoredEvent
from orchestrator.record.model import Row, Snapshot, natural_order
from orchestrator.view.cells import (
    ELLIPSIS,
    MISSING,
    clean,
    clock,
    decimals_for,
    number,
    share_pct,
    shorten,
    whole,
)
from workers.messages import StepCounts
from workers.units import MIB

_LINES_MOST = 30
"""Of a section. A run with many errors has thousands; the last ones show how it ended."""


#: Endings of names -> unit, and by what a value is multiplied for it; the longest first.
_UNITS: Final = {
    "_unix_s": ("", 1.0),
    "_bytes": (" MiB", 1 / MIB),
    "_pct": (" %", 1.0),
    "_mhz": (" MHz", 1.0),
    "_s": (" s", 1.0),
    "_c": (" °C", 1.0),
    "_w": (" W", 1.0),
}
#: Of an event: for programs, or told by its time and slot.
_UNTOLD: Final = frozenset({"worker_at_unix_s", "sequence", "incarnation", "node_id", "traceback"})
#: Names of events that are not English as they are.
_EVENTS: Final = {
    "oom": "out of memory",
    "device_opened": "opened its device",
    "claimed": "obtained memory",
    "leased": "was allowed memory",
    "gave_way": "made room",
    "retry": "tries again",
    "counting": "the planned time begins",
    "chaos": "injected faults",
    "chaos_strike": "injected fault",
    "slice_failed": "gave no report",
    "death_explained": "why its process ended",
    "workload_error": "error of the workload",
}


def counted(count: int, noun: str, nouns: str | None = None) -> str:
    """Return "1 restart", "2 restarts"; `nouns` where an s does not make the plural."""
    return f"{whole(count)} {noun if count == 1 else nouns or noun + 's'}"


def tflops_words(tflops: float | None) -> str:
    """Return a throughput with its unit."""
    return f"{number(tflops, decimals_for((tflops,))) or MISSING} TFLOP/s"


def time_words(snapshot: Snapshot) -> str:
    """Return how far the run is: "00:10 of 05:00", or how long it has been starting, which does not
    count.
    """
    if snapshot.starting_s is not None:
        left = "" if snapshot.jobs is not None else f", then {clock(snapshot.remaining_s)} of work"
        return f"starting for {clock(snapshot.starting_s)}{left}"
    if snapshot.jobs is not None:
        return f"{clock(snapshot.elapsed_s)} so far"
    return f"{clock(snapshot.elapsed_s)} of {clock(snapshot.duration_s)}"


def fault_lines(faults: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what became of injected faults, a line for each kind: "21 kill: 17 recovered after 5.9
    s (median)".
    """
    fates: defaultdict[str, Counter[str]] = defaultdict(Counter)
    took_s: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for fault in faults:
        kind, fate = str(fault.get("kind")), str(fault.get("fate", "unknown")).replace("_", " ")
        count, recovered_s = fault.get("count", 1), fault.get("recovered_s")
        fates[kind][fate] += count if isinstance(count, int) else 1
        if isinstance(recovered_s, int | float):
            took_s[kind, fate].append(recovered_s)

    def said(kind: str, fate: str, count: int) -> str:
        known_s = took_s[kind, fate]
        return f"{count} {fate}" + (f" after {median(known_s):.1f} s (median)" if known_s else "")

    return tuple(
        f"{counts.total()} {kind}: "
        f"{', '.join(said(kind, fate, count) for fate, count in counts.most_common())}"
        for kind, counts in sorted(fates.items())
    )


def section(title: str, said: Iterable[str]) -> list[str]:
    """Return lines under a title with a blank line before it.

    Of many the last, and nothing of none.
    """
    lines = [f"  {clean(line)}" for line in said]
    if not lines:
        return []
    hidden = len(lines) - _LINES_MOST
    more = [f"  {ELLIPSIS} {hidden} before these, in events.jsonl"] if hidden > 0 else []
    return ["", title, *more, *lines[-_LINES_MOST:]]


def totals(snapshot: Snapshot) -> tuple[str, ...]:
    """Return what happened over the run, a phrase for each kind."""
    restarts = counted(snapshot.restart_count, "restart")
    if snapshot.steps_lost_upper_bound:
        restarts += f" (at most {counted(snapshot.steps_lost_upper_bound, 'step')} lost)"
    counts = snapshot.counts
    said = [
        _steps_words(counts),
        f"{whole(counts.oom_count)} OOM",
        counted(counts.emergency_count, "emergency", "emergencies"),
        restarts,
    ]
    if counts.verify_checks or counts.verify_errors:
        said.append(
            f"{counted(counts.verify_checks, 'check')}, {whole(counts.verify_errors)} wrong"
        )
    return tuple(said)


def closing_lines(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the end of a run in a line per node and one for all."""
    nodes: defaultdict[str, list[Row]] = defaultdict(list)
    for row in snapshot.rows:
        nodes[row.node].append(row)
    names = {node: shorten(clean(node), 24) for node in sorted(nodes, key=natural_order)}
    longest = max([len("total"), *map(len, names.values())])

    def line(name: str, workers: int, tflops: float | None, *said: str) -> str:
        return "  ".join(
            (f"{name:<{longest}}", counted(workers, "worker"), tflops_words(tflops), *said)
        )

    lines = []
    for node, name in names.items():
        rows = nodes[node]
        known = [row.tflops for row in rows if row.tflops is not None]
        counts = StepCounts.total(row.counts for row in rows)
        restarts = counted(sum(row.restarts for row in rows), "restart")
        said = (_steps_words(counts), f"{whole(counts.oom_count)} OOM", restarts)
        lines.append(line(name, len(rows), sum(known) if known else None, *said))
    lines += _training_lines(snapshot.rows)
    ran = f"ran {clean(format_duration(snapshot.elapsed_s))}"
    return (
        *lines,
        line("total", len(snapshot.rows), snapshot.tflops_total, *totals(snapshot), ran),
    )


def exception_line(text: str) -> str:
    """Return text; of a traceback, only the line that names the exception."""
    lines = text.strip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith((" ", "Traceback"))]
    behind = lines[frames[-1] + 1 :] if frames else []
    return behind[0] if "Traceback" in text and behind else text


def time_of_day(at: str) -> str:
    """Return the local time of a moment that an event tells in ISO 8601; what is none as it is."""
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return at


def event_words(event: StoredEvent) -> tuple[str, str]:
    """Return what has happened, and its details with their units; `size 512 to 256` is a change."""
    details, said = dict(event.details), []
    for key, value in details.items():
        if key in _UNTOLD or key.startswith("from_") or value is None or value == "":
            continue
        before = details.get(f"from_{key}")
        suffix = next((suffix for suffix in _UNITS if key.endswith(suffix)), "")
        words = _with_unit(value, suffix)
        if before is not None and before != value:
            words = f"{_with_unit(before, suffix)} to {words}"
        said.append(f"{key.removesuffix(suffix).replace('_', ' ')} {words}")
    if event.event == "state":
        change = f"{details.get('from_state')} to {details.get('to_state')}"
        said = [f"{change}: {details.get('cause')}".removesuffix(": ")]
    elif event.event == "workload_error":
        said = [exception_line(str(details.get("traceback")))]
    return _EVENTS.get(event.event, event.event.replace("_", " ")), ", ".join(said)


def _with_unit(value: object, suffix: str) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(_with_unit(item, suffix) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if suffix == "_unix_s":
        return time_of_day(datetime.fromtimestamp(value, UTC).isoformat())
    unit, times = (
        _UNITS.get(suffix, ("", 1.0))
        if suffix != "_bytes" or abs(value) >= MIB
        else (" bytes", 1.0)
    )
    return f"{value * times:.5g}{unit}" if unit or isinstance(value, float) else str(value)


def _training_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield how far each slot that trains came."""
    for row in rows:
        told = row.progress
        if told.train_step is None:
            continue
        decimals = decimals_for((told.loss, told.first_loss))
        first, last = (number(loss, decimals) or MISSING for loss in (told.first_loss, told.loss))
        of = "" if told.train_steps is None else f" of {whole(told.train_steps)}"
        said = [f"trained {whole(told.train_step)}{of} steps", f"loss {first} -> {last}"]
        if told.saved_step is not None:
            said.append(f"saved at {whole(told.saved_step)}")
        if told.redone_steps:
            said.append(f"{counted(told.redone_steps, 'step')} done again")
        if told.weights_sha256 is not None:
            said.append(f"weights {clean(told.weights_sha256)[:12]}")
        yield f"{clean(row.slot)}  {', '.join(said)}"


def _steps_words(counts: StepCounts) -> str:
    good = share_pct(counts.success_rate)
    return (
        "no steps yet"
        if good is None
        else f"{good} % of {counted(counts.steps_judged, 'step')} good"
    )
