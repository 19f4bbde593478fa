"""Describes sums, events and facts of a run in words.

Pure. Does not cover the cells of tables, nor outcome and exit code, which the head decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from orchestrator.config.duration import format_duration
from orchestrator.record.events import StoredEvent
from orchestrator.record.model import Snapshot
from orchestrator.view.cells import ELLIPSIS, clean, moment, number, share_pct
from workers.units import MIB

_LINES_MOST = 30
"""Most lines of a section. A run may have thousands of errors; the last show how it ended."""

#: Ending of a name -> function that formats the value with its unit; the longest ending first.
_UNITS: Final[Mapping[str, Callable[[float], str]]] = {
    "_unix_s": lambda unix_s: moment(unix_s, "%H:%M:%S"),
    "_bytes": lambda size: f"{size} bytes" if abs(size) < MIB else f"{size / MIB:.5g} MiB",
    "_mib": lambda size: f"{size:.5g} MiB",
    "_pct": lambda share: f"{share:.5g} %",
    "_mhz": lambda clock: f"{clock:.5g} MHz",
    "_per_s": lambda rate: f"{rate:.5g} per s",
    "_s": lambda seconds: f"{seconds:.5g} s" if seconds < 60 else format_duration(seconds),
    "_c": lambda degrees: f"{degrees:.5g} °C",
    "_w": lambda power: f"{power:.5g} W",
}
#: Details of an event that are for programs, or implied by its time and slot.
_OMITTED: Final = frozenset(
    {"worker_at_unix_s", "sequence", "incarnation", "node_id", "traceback", "at_s", "job", "id"}
)


def counted(count: int, noun: str, nouns: str | None = None) -> str:
    """Return "1 restart" or "2 restarts"; `nouns` is an irregular plural."""
    return f"{number(count)} {noun if count == 1 else nouns or noun + 's'}"


def fault_lines(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the numbers of injected faults by kind and fate, as "17 kill recovered"."""
    kinds = Counter[str]()
    for fault in faults:
        count, fate = fault.get("count"), str(fault.get("fate", "unknown")).replace("_", " ")
        kinds[f"{fault.get('kind')} {fate}"] += count if isinstance(count, int) else 1
    return [f"{count} {words}" for words, count in sorted(kinds.items())]


def section(title: str, texts: Iterable[str]) -> list[str]:
    """Return a blank line, a title and the last `_LINES_MOST` texts, indented; nothing if none."""
    lines = [f"  {clean(line)}" for line in texts]
    if not lines:
        return []
    hidden = len(lines) - _LINES_MOST
    more = [f"  {ELLIPSIS} {hidden} before these, in events.jsonl"] if hidden > 0 else []
    return ["", title, *more, *lines[-_LINES_MOST:]]


def totals(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the sums of a run: steps, OOM, emergencies, restarts and checks."""
    counts = snapshot.counts
    good = share_pct(counts.success_rate)
    steps = counted(counts.steps_judged, "part" if counts.parts_further else "step")
    checks = f"{counted(counts.verify_checks, 'check')}, {number(counts.verify_errors)} wrong"
    return (
        "no steps yet" if good is None else f"{good} % of {steps} good",
        f"{number(counts.oom_count)} OOM",
        counted(counts.emergency_count, "emergency", "emergencies"),
        counted(snapshot.restart_count, "restart"),
        *([checks] if counts.verify_checks or counts.verify_errors else []),
    )


def exception_line(text: str) -> str:
    """Return a text unchanged; for a traceback, only the line that names the exception."""
    lines = text.strip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith((" ", "Traceback"))]
    rest = lines[frames[-1] + 1 :] if frames else []
    return rest[0] if "Traceback" in text and rest else text


def event_words(event: StoredEvent) -> tuple[str, str]:
    """Return an event's name in words and its details with units; a change is "size 512 to 256"."""
    details, phrases = dict(event.details), []
    for key, value in details.items():
        if key in _OMITTED or key.startswith("from_") or value is None or value == "":
            continue
        before = details.get(f"from_{key}")
        name, words = fact_words(key, value)
        if before is not None and before != value:
            words = f"{fact_words(key, before)[1]} to {words}"
        phrases.append(f"{name} {words}")
    if event.event == "state":
        change = f"{details.get('from_state')} to {details.get('to_state')}"
        phrases = [f"{change}: {details.get('cause')}".removesuffix(": ")]
    elif event.event == "workload_error":
        phrases = [exception_line(str(details.get("traceback")))]
    return event.event.replace("_", " "), ", ".join(phrases)


def fact_words(key: str, value: object) -> tuple[str, str]:
    """Return a name in words, and its value with the unit that the ending of the name says."""
    ending = next((ending for ending in _UNITS if key.endswith(ending)), "")
    if isinstance(value, bool):
        words = "yes" if value else "no"
    elif isinstance(value, int | float) and ending:
        words = _UNITS[ending](value)
    elif isinstance(value, float):
        words = f"{value:.5g}"
    elif isinstance(value, list | tuple):
        words = "; ".join(fact_words(key, item)[1] for item in value)
    elif isinstance(value, Mapping):  # settings, as they are typed
        words = ", ".join(f"{name}={item}" for name, item in value.items())
    else:
        words = str(value)
    return key.removesuffix(ending).replace("_", " "), words
