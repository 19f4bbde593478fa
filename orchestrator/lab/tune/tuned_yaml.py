"""The user's file with other values of `train:`. Pure.

Lines are edited, so that comments and everything else stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError

_SECTION: Final = re.compile(r"^train:[ \t]*(#.*)?$", re.MULTILINE)

#: A line that belongs to no section: it begins at the left edge, and is no comment.
_NEXT: Final = re.compile(r"^[^\s#]", re.MULTILINE)


def tuned_yaml(
    text: str, config: Config, changes: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    """Return the text of a file that loads as `config` with `changes` in `train:`.

    Where the section is written in a way that lines cannot be edited (in braces, with anchors), the
    whole file is written anew.

    Args:
        text: The user's file.
        config: What it loads as.
        changes: Keys of `train:` with their new values.
        notes: What is said beside each key.
    """
    train = {**config.train.model_dump(), **changes}
    wanted = Config.model_validate({**config.model_dump(), "train": train})
    edited = _edited(text, changes, notes)
    try:
        if config_from_text(edited, "tuned.yaml") == wanted:
            return edited
    except ConfigError:
        pass
    return _edited(dump_config(wanted), changes, notes)


def _edited(text: str, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    text = text if text.endswith("\n") or not text else f"{text}\n"
    begins = _SECTION.search(text)
    if begins is None:
        return f"{text}train:\n" + "".join(_line("  ", key, changes[key], notes) for key in changes)
    following = _NEXT.search(text, begins.end())
    end = len(text) if following is None else following.start()
    head, section, rest = text[: begins.end() + 1], text[begins.end() + 1 : end], text[end:]
    indent = next(iter(re.findall(r"^([ ]+)\w", section, re.MULTILINE)), "  ")
    for key, value in changes.items():
        line = _line(indent, key, value, notes)
        there = re.search(rf"^{indent}{re.escape(key)}:.*\n", section, re.MULTILINE)
        start, stop = (0, 0) if there is None else there.span()
        section = section[:start] + line + section[stop:]
    return head + section + rest


def _line(indent: str, key: str, value: object, notes: Mapping[str, str]) -> str:
    plain = yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True).strip()
    note = " ".join(notes.get(key, "").split())
    return f"{indent}{plain}  # {note}\n" if note else f"{indent}{plain}\n"
