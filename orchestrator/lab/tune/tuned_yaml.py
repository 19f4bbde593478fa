"""The user's file with the chosen settings: only keys of `train:` change, each with its measurement
beside it.

Edits lines, so that comments and everything else stay. Where the section is written in a way that
lines cannot be edited (in braces, with anchors), the whole configuration is written anew. Does not
choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.tune.levers import PLAIN
from orchestrator.lab.tune.rows import Row
from workers.units import MIB

_SECTION: Final = re.compile(r"^train:[ \t]*(#.*)?$", re.MULTILINE)

#: A line that belongs to no section: it begins at the left edge, and is no comment.
_NEXT: Final = re.compile(r"^[^\s#]", re.MULTILINE)


def tuned(text: str, config: Config, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return the text of a file that loads as `config` with `changes` in `train:`.

    Args:
        text: The user's file.
        config: What it loads as, with the overrides that were given.
        changes: Keys of `train:` with their new values.
        notes: What is said beside each key.
    """
    wanted = Config.model_validate(
        {**config.model_dump(), "train": {**config.train.model_dump(), **changes}}
    )
    edited = _edited(text, changes, notes)
    try:
        if config_from_text(edited, "tuned.yaml") == wanted:
            return edited
    except ConfigError:
        pass
    return _edited(dump_config(wanted), changes, notes)


def notes_of(changes: Mapping[str, Any], rows: Sequence[Row], tune_id: str) -> dict[str, str]:
    """Return what is said beside each changed key: its own measurement, where it has one."""
    by_name: dict[str, Row] = {}
    for row in rows:
        by_name.setdefault(f"{row.lever}={row.setting}", row)
    notes = {}
    for key, value in changes.items():
        found = by_name.get(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        other = "as the baseline" if key in PLAIN else "as it was measured"
        notes[key] = (
            f"tune {tune_id}: {other if found is None else ', '.join(_figures(found)) or other}"
        )
    return notes


def _figures(row: Row) -> Iterator[str]:
    if row.speed_ratio is not None and row.speed_low is not None and row.speed_high is not None:
        yield (
            f"{row.speed_ratio:.3f} x the baseline's speed ({row.speed_low:.3f} to "
            f"{row.speed_high:.3f})"
        )
    if row.peak_bytes is not None and row.peak_delta_bytes is not None:
        yield f"{row.peak_delta_bytes / MIB:+.1f} MiB peak memory"


def _edited(text: str, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    lines = text if text.endswith("\n") or not text else f"{text}\n"
    found = _SECTION.search(lines)
    if found is None:
        return f"{lines}train:\n" + "".join(
            _line("  ", key, changes[key], notes) for key in changes
        )
    following = _NEXT.search(lines, found.end())
    end = len(lines) if following is None else following.start()
    head, section, rest = lines[: found.end() + 1], lines[found.end() + 1 : end], lines[end:]
    indent = next(iter(re.findall(r"^([ ]+)\w", section, re.MULTILINE)), "  ")
    for key, value in changes.items():
        line = _line(indent, key, value, notes)
        pattern = re.compile(rf"^{indent}{re.escape(key)}:.*\n", re.MULTILINE)
        there = pattern.search(section)
        before, after = (
            ("", section) if there is None else (section[: there.start()], section[there.end() :])
        )
        section = before + line + after
    return head + section + rest


def _line(indent: str, key: str, value: object, notes: Mapping[str, str]) -> str:
    plain = yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True).strip()
    note = " ".join(notes.get(key, "").split())
    return f"{indent}{plain}  # {note}\n" if note else f"{indent}{plain}\n"
