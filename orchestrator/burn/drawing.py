"""The result of a burn-in for people: a table for each phase, the reasons below it, one word at the end. No I/O.

A verdict is a word and a colour; no information is in the colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.burn.results import BurnResult, PhaseResult, Taken
from orchestrator.burn.verdict import Check, Judged, Verdict, error_count, verdict_of
from orchestrator.config.duration import format_duration
from orchestrator.watch.cells import Glyphs, decimals_for, number, share_pct, whole
from orchestrator.watch.phrases import counted
from workers.messages import StepCounts

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_JUDGED: "yellow"}

#: Longest line of text, so that it is easy to read.
_WIDEST = 110

_NODE_CELLS = 20

_TITLES = ("node", "verdict", "VRAM %", "errors", "wrong", "max C", "hot %", "slow %", "TFLOP/s", "cv %")


def result_lines(result: BurnResult, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Yield the result, piece by piece.

    Args:
        result: What was found.
        width: Cells of a line of the terminal.
        glyphs: `glyphs_for(stream.encoding)` of the stream it will be printed to.
    """
    room = min(width, _WIDEST)
    for phase in result.phases:
        length_s = sum(taken.elapsed_s for taken in phase.taken)
        yield Text()
        head = f"Phase {phase.phase.value}, {phase.phase.title}, {glyphs.clean(format_duration(length_s))}: "
        yield Text(head, style="bold").append_text(_word(phase.verdict, glyphs))
        if phase.workers:
            yield _table(phase, glyphs)
        for line in _reasons(phase, glyphs):
            first, *others = wrap(line, room - 4, break_on_hyphens=False) or [""]
            yield Text("  " + first)
            for text in others:
                yield Text("    " + text)
    yield Text()
    for line in wrap(_closing(result, glyphs), room, break_on_hyphens=False):
        yield Text(line, style="bold")


def _word(verdict: Verdict, glyphs: Glyphs) -> Text:
    text = glyphs.missing if verdict is Verdict.NOT_JUDGED else verdict.value.upper()
    return Text(text, style=_STYLES[verdict])


def _table(phase: PhaseResult, glyphs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in _TITLES:
        table.add_column(title, justify="left" if title in {"node", "verdict"} else "right", no_wrap=True)
    for taken in phase.taken:
        for node in dict.fromkeys(worker.row.node for worker in taken.workers):
            workers = [worker for worker in taken.workers if worker.row.node == node]
            table.add_row(*_cells(phase, taken, workers, glyphs))
    return table


def _cells(phase: PhaseResult, taken: Taken, workers: Sequence[Judged], glyphs: Glyphs) -> Iterator[Text]:
    """Yield a node's cells: of its workers, always what the worst one shows."""
    figures = [worker.figures for worker in workers]
    counts = StepCounts.total(worker.row.counts for worker in workers)
    checks, wrong = counts.verify_checks, counts.verify_errors
    held = [one.vram_held_share for one in figures if one.vram_held_share is not None]
    sums = [one.tflops_mean for one in figures if one.tflops_mean is not None]
    total = sum(sums) if sums else None
    asked, used = taken.take.dtype, workers[0].row.dtype
    name = workers[0].row.node
    if asked is not None:
        name += f" {asked}" if used in {asked, None} else f" {asked} ({used})"  # a processor runs fp16 as bf16
    yield Text(glyphs.shorten(glyphs.clean(name), _NODE_CELLS))
    yield _word(verdict_of(phase.phase, workers, whole=taken.whole), glyphs)
    cells = (
        (Check.MEMORY, share_pct(min(held, default=None))),
        (Check.ERRORS, whole(sum(error_count(worker.row, worker.figures) for worker in workers))),
        (Check.RESULTS, f"{whole(wrong)}/{whole(checks)}" if checks or wrong else None),
        (Check.TEMPERATURE, number(_most(one.temperature_max_c for one in figures), 0)),
        (Check.TEMPERATURE, _pct(_most(one.hot_share for one in figures))),
        (Check.SLOWDOWN, _pct(_most(one.slowed_share for one in figures))),
        (Check.THROUGHPUT, number(total, decimals_for((total,)))),
        (Check.THROUGHPUT, number(_most(_hundredfold(one.tflops_cv) for one in figures), 1)),
    )
    for check, text in cells:
        failed = any(
            finding.check is check and finding.verdict is Verdict.FAIL
            for worker in workers
            for finding in worker.findings
        )
        yield Text(text or glyphs.missing, style=_STYLES[Verdict.FAIL] if failed else "")


def _reasons(phase: PhaseResult, glyphs: Glyphs) -> Iterator[str]:
    """Yield why, the failures first; what is true of many workers is said once."""
    for taken in phase.taken:
        if taken.error is not None:
            yield glyphs.clean(f"FAIL {phase.phase.title}: {taken.error}")
    for verdict in (Verdict.FAIL, Verdict.NOT_JUDGED):
        told: dict[tuple[Check, str, str], list[str]] = {}
        for taken in phase.taken:
            dtype = "" if taken.take.dtype is None else f" {taken.take.dtype}"
            for worker in taken.workers:
                for finding in worker.findings:
                    if finding.verdict is verdict:
                        # What could not be judged has the same reason everywhere; of a failure each node has its own.
                        where = "" if verdict is Verdict.NOT_JUDGED else worker.row.node + dtype
                        text = finding.text if verdict is Verdict.NOT_JUDGED else ""
                        told.setdefault((finding.check, where, text), []).append(f"{worker.row.slot}: {finding.text}")
        for (check, where, text), lines in told.items():
            if verdict is Verdict.NOT_JUDGED:
                yield glyphs.clean(f"{glyphs.missing} {check} not judged: {text}")
            else:
                more = f" (and {counted(len(lines) - 1, 'more worker')})" if len(lines) > 1 else ""
                dtype = where.partition(" ")[2]
                yield glyphs.clean(f"FAIL {check}{f' in {dtype}' if dtype else ''}, {lines[0]}{more}")


def _closing(result: BurnResult, glyphs: Glyphs) -> str:
    if result.interrupted:
        return "Interrupted: the results above are incomplete, and the rest was not judged."
    match result.verdict:
        case Verdict.PASS:
            unknown = ", ".join(result.not_judged)
            words = f"PASS: nothing failed; not judged everywhere: {unknown}." if unknown else "PASS: all of it."
        case Verdict.FAIL:
            words = "FAIL: " + ", ".join(
                f"phase {phase.phase.value}" for phase in result.phases if phase.verdict is Verdict.FAIL
            )
        case Verdict.NOT_JUDGED:
            missing = [phase for phase in result.phases if phase.verdict is Verdict.NOT_JUDGED]
            words = (
                f"NOT JUDGED: nothing failed, but {' and '.join(f'phase {phase.phase.value}' for phase in missing)} "
                f"could not be judged, so this is no pass."
            )
    return glyphs.clean(words)


def _most(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _hundredfold(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _pct(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f}"
