"""Reads the addresses that notifications go to. They are secrets: no file of a run and no line of
output may contain them.

Does not interpret or use them (`view/notify.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import stat
from pathlib import Path
from typing import Final

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import UsageError, one_line
from workers.files import read_small

URLS_VARIABLE: Final = "ORCHESTRATOR_NOTIFY_URLS"
"""Addresses separated by blanks; they replace `notify.urls_file`."""

_MOST_BYTES: Final = 64 * 2**10
_URLS_MOST: Final = 20


def notify_urls(settings: NotifyConfig) -> tuple[str, ...]:
    """Return the configured addresses; empty if there are none.

    Raises:
        UsageError: Their file is missing or open to other users, there are too many addresses, or
            apprise is not installed.
    """
    typed = os.environ.get(URLS_VARIABLE, "").split()
    if not typed and settings.urls_file is None:
        return ()
    urls = tuple(typed or _from_file(Path(str(settings.urls_file)).expanduser()))
    where = URLS_VARIABLE if typed else str(settings.urls_file)
    if not 1 <= len(urls) <= _URLS_MOST:
        raise UsageError(
            one_line(f"{where} has {len(urls)} addresses; valid: 1 to {_URLS_MOST}, one a line")
        )
    if importlib.util.find_spec("apprise") is None:
        raise UsageError(
            f"notifications ({one_line(where)}) need the package apprise; type: pip install "
            "'.[notify]'"
        )
    return urls


def _from_file(path: Path) -> list[str]:
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            what = f"other users can read or change {path}, and addresses are secrets"
            fix = f"chmod 600 {shlex.quote(str(path))}"
            raise UsageError(one_line(f"notify.urls_file: {what}; type: {fix}"))
        lines = [line.strip() for line in read_small(path, _MOST_BYTES).splitlines()]
    except (OSError, UnicodeDecodeError) as failure:
        text = f"notify.urls_file: {path} cannot be read: {failure}"
        raise UsageError(one_line(text)) from failure
    return [line for line in lines if line and not line.startswith("#")]
