"""The verb `advise`: says why the cards of a run were not busy, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from orchestrator.errors import NothingStoredError, one_line
from orchestrator.lab.advise.advice import advice, notes
from orchestrator.lab.advise.causes import answers
from orchestrator.lab.advise.collect import facts_of
from orchestrator.lab.advise.drawing import answer_json, answer_lines
from orchestrator.lab.tune.store import results
from orchestrator.record.archive import read_run
from orchestrator.record.folders import LATEST, find_run, list_runs
from orchestrator.view.cells import Glyphs

NOTHING: Final = 0
ADVICE: Final = 1
CANNOT_TELL: Final = 3


def advise(
    runs_dir: Path,
    run_id: str,
    say: Callable[[str], None],
    glyphs: Glyphs,
    *,
    json: bool,
    width: int | None = None,
) -> int:
    """Print the answer for a run and return the exit code: 0 nothing to change, 1 advice, 3 cannot
    tell.

    `width` is that of the terminal; `None`: there is none, and no line is broken.

    Raises:
        UsageError: There is no such run.
        ArchiveError: It cannot be read.
    """
    if run_id == LATEST and not list_runs(runs_dir):
        return _unknown(
            None, f"there is no run in {runs_dir}; type: python -m orchestrator run", say, json=json
        )
    folder = find_run(runs_dir, run_id)
    try:
        facts = facts_of(folder)
    except NothingStoredError as error:
        return _unknown(folder.name, str(error), say, json=json)
    if not facts.cards:
        run = read_run(folder)
        why = (
            f"run {run.facts.run_id} has had no worker yet"
            if run.error is None
            else f"it had no worker: {run.error}"
        )
        return _unknown(folder.name, one_line(why), say, json=json)
    told = answers(facts)
    tunings = results()
    todo, more = advice(facts, told, tunings), notes(facts, told, tunings)
    can_tell = any(answer.unknown is None for answer in told)
    code = ADVICE if todo else NOTHING if can_tell else CANNOT_TELL
    if json:
        say(answer_json(facts.run_id, code, told, todo, more))
    else:
        for line in answer_lines(facts.run_id, told, todo, more, glyphs, width):
            say(line)
    return code


def _unknown(run_id: str | None, reason: str, say: Callable[[str], None], *, json: bool) -> int:
    say(answer_json(run_id, CANNOT_TELL, (), (), (reason,)) if json else f"Cannot tell: {reason}")
    return CANNOT_TELL
