"""The results page: what was found, as Markdown for docs/results. Tables and facts, no judgement of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.common import short, table

from acceptance.outcome import Outcome

_HOST = (
    ("card", "card"),
    ("memory shown, bytes", "total_bytes"),
    ("memory free before, bytes", "free_bytes"),
    ("compute capability", "compute_capability"),
    ("multiprocessors", "multiprocessors"),
    ("driver", "driver"),
    ("CUDA context of a worker, bytes", "context_bytes"),
    ("how the context is known", "context_source"),
    ("torch", "torch"),
    ("CUDA of torch", "cuda"),
    ("Python", "python"),
    ("system", "system"),
    ("cores", "cores"),
    ("date", "date"),
)


def page(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    return "\n".join(_lines(host, outcomes)) + "\n"


def _lines(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"# Acceptance on {host['card']}, {str(host['date']).split(maxsplit=1)[0]}"
    yield ""
    yield _facts(host, outcomes)
    yield ""
    yield from _markdown(["what", "value"], ([words, short(host[key])] for words, key in _HOST))
    yield from (f"| command | `{host['command']}` |", "")
    yield "## Checks"
    yield ""
    yield from _markdown(
        ["check", "verdict", "must hold"], ([each.check, each.word, each.must_hold] for each in outcomes)
    )
    for each in outcomes:
        yield from ("", f"## {each.check}: {each.word}", "")
        if each.figures:
            yield from _markdown(["figure", "value"], ([key, short(value)] for key, value in each.figures.items()))
        if each.rows:
            heads, *rows = table(each.rows)
            yield ""
            yield from _markdown(heads, rows)
        sentences = [*each.broken, *each.notes, *([each.skipped] if each.skipped else [])]
        if sentences:
            yield ""
            yield from (f"- {sentence}" for sentence in sentences)


def _facts(host: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    held = [each.check for each in outcomes if each.ok]
    broken = [each.check for each in outcomes if each.ok is False]
    skipped = [each.check for each in outcomes if each.ok is None]
    where = f"{host['card']}, driver {short(host['driver'])}, torch {host['torch']}, Python {host['python']}"
    words = [f"{where}, {host['date']}: {len(held)} of {len(outcomes)} checks hold"]
    words += [f"broken: {', '.join(broken)}"] if broken else []
    words += [f"skipped: {', '.join(skipped)}"] if skipped else []
    return "; ".join(words) + "."


def _markdown(heads: Sequence[str], rows: Iterator[list[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    yield _cells(heads)
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield _cells(row)


def _cells(row: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
