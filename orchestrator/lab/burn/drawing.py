"""The result of a burn-in for people: a table for each phase, the reasons below it, one word at the
end. No I/O.

A verdict is a word and a colour; no information is in the colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.config.duration import format_duration
from orchestrator.lab.burn.results import BurnResult, PhaseResult, Taken, by_node
from orchestrator.lab.burn.verdict import Check, Judged, Verdict, error_count, verdict_of
from orchestrator.view.cells import Glyphs, decimals_for, number, share_pct, whole
from orchestrator.view.phrases import counted
from workers.messages import StepCounts

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_JUDGED: "yellow"}

#: Longest line of text, so that it is easy to read.
_WIDEST = 110

_NODE_CELLS = 20

_TITLES = (
    "node",
    "verdict",
    "VRAM %",
    "errors",
    "wrong",
    "max C",
    "hot %",
    "slow %",
    "TFLOP/s",
    "cv %",
)


def result_lines(result: BurnResult, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Yield the result, piece by piece, for a terminal with lines of `width` cells and these
    glyphs.
    """
    room = min(width, _WIDEST)
    for phase in result.phases:
        length_s = sum(taken.elapsed_s for taken in phase.taken)
        yield Text()
        head = (
            f"Phase {phase.phase.value}, {phase.phase.title}, "
            f"{glyphs.clean(format_duration(length_s))}: "
        )
        yield Text(head, style="bold").append_text(_word(phase.verdict, glyphs))
        if phase.workers:
            yield _table(phase, glyphs)
        for line in _reasons(phase, glyphs):
            for text in wrap(
                line, room, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            ):
                yield Text(text)
    yield Text()
    for line in wrap(_closing(result), room, break_on_hyphens=False):
        yield Text(line, style="bold")


def _word(verdict: Verdict, glyphs: Glyphs) -> Text:
    text = glyphs.missing if verdict is Verdict.NOT_JUDGED else verdict.value.upper()
    return Text(text, style=_STYLES[verdict])


def _table(phase: PhaseResult, glyphs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in _TITLES:
        table.add_column(
            title, justify="left" if title in {"node", "verdict"} else "right", no_wrap=True
        )
    for taken in phase.taken:
        for _, workers in by_node(taken.workers):
            table.add_row(*_cells(phase, taken, workers, glyphs))
    return table


def _cells(
    phase: PhaseResult, taken: Taken, workers: Sequence[Judged], glyphs: Glyphs
) -> Iterator[Text]:
    """Yield a node's cells: of its workers, always what the worst one shows."""
    figures = [worker.figures for worker in workers]
    counts = StepCounts.total(worker.row.counts for worker in workers)
    checks, wrong = counts.verify_checks, counts.verify_errors
    sums = [one.tflops_mean for one in figures if one.tflops_mean is not None]
    total = sum(sums) if sums else None
    held_pct = min(
        (one.vram_held_pct for one in figures if one.vram_held_pct is not None), default=None
    )
    asked, used = taken.take.dtype, workers[0].row.dtype
    name = workers[0].row.node
    if asked is not None:
        name += (
            f" {asked}" if used in {asked, None} else f" {asked} ({used})"
        )  # a processor runs fp16 as bf16
    yield Text(glyphs.shorten(glyphs.clean(name), _NODE_CELLS))
    yield _word(verdict_of(phase.phase, workers, whole=taken.whole), glyphs)
    cells = (
        (Check.MEMORY, share_pct(None if held_pct is None else held_pct / 100)),
        (Check.ERRORS, whole(sum(error_count(worker.row, worker.figures) for worker in workers))),
        (Check.RESULTS, f"{whole(wrong)}/{whole(checks)}" if checks or wrong else None),
        (Check.TEMPERATURE, number(_most(one.temperature_max_c for one in figures), 0)),
        (Check.TEMPERATURE, number(_most(one.hot_pct for one in figures), 0)),
        (Check.SLOWDOWN, number(_most(one.slowed_pct for one in figures), 0)),
        (Check.THROUGHPUT, number(total, decimals_for((total,)))),
        (Check.THROUGHPUT, number(_most(one.tflops_cv_pct for one in figures), 1)),
    )
    for check, text in cells:
        failed = any(worker.findings[check].verdict is Verdict.FAIL for worker in workers)
        yield Text(text or glyphs.missing, style=_STYLES[Verdict.FAIL] if failed else "")


def _reasons(phase: PhaseResult, glyphs: Glyphs) -> Iterator[str]:
    """Yield why, the failures first; what is true of many workers is said once."""
    for taken in phase.taken:
        if taken.error is not None:
            yield glyphs.clean(f"FAIL {phase.phase.title}: {taken.error}")
    judged = [
        (taken.take.dtype, worker, check, finding)
        for taken in phase.taken
        for worker in taken.workers
        for check, finding in worker.findings.items()
    ]
    failures: dict[tuple[Check, str, str | None], list[str]] = {}  # each node has its own
    for dtype, worker, check, finding in judged:
        if finding.verdict is Verdict.FAIL:
            key = (check, worker.row.node, dtype)
            failures.setdefault(key, []).append(f"{worker.row.slot}: {finding.text}")
    for (check, _, dtype), lines in failures.items():
        more = f" (and {counted(len(lines) - 1, 'more worker')})" if len(lines) > 1 else ""
        yield glyphs.clean(f"FAIL {check}{f' in {dtype}' if dtype else ''}, {lines[0]}{more}")
    # What could not be judged has the same reason everywhere.
    unknown = [
        (check, finding.text)
        for _, _, check, finding in judged
        if finding.verdict is Verdict.NOT_JUDGED
    ]
    for check, text in dict.fromkeys(unknown):
        yield glyphs.clean(f"{glyphs.missing} {check} not judged: {text}")


def _closing(result: BurnResult) -> str:
    if result.interrupted:
        return "Interrupted: the results above are incomplete, and the rest was not judged."

    def phases(verdict: Verdict) -> list[str]:
        return [f"phase {phase.phase.value}" for phase in result.phases if phase.verdict is verdict]

    if result.verdict is Verdict.FAIL:
        return "FAIL: " + ", ".join(phases(Verdict.FAIL))
    if result.verdict is Verdict.NOT_JUDGED:
        unknown = " and ".join(phases(Verdict.NOT_JUDGED))
        return f"NOT JUDGED: nothing failed, but {unknown} could not be judged, so this is no pass."
    unknown = ", ".join(result.not_judged)
    return (
        f"PASS: nothing failed; not judged everywhere: {unknown}."
        if unknown
        else "PASS: all of it."
    )


def _most(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
