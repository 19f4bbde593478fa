"""The verb `notify` with a pace of the test.

python -m tests.notify.notifier_process FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.config.notify_urls import URLS_VARIABLE
from orchestrator.config.schema import NotifyConfig
from orchestrator.view.notify.notifier import Notifier
from orchestrator.view.notify.outbox import Pace

PACE = Pace(between_s=1.0, gather_s=0.5, over_s=1.0, head_back_s=1.0)

if __name__ == "__main__":
    notifier = Notifier(
        folder=Path(sys.argv[1]),
        settings=NotifyConfig(),
        urls=os.environ[URLS_VARIABLE].split(),
        say=lambda line: print(line, flush=True),  # noqa: T201 - as the verb does
        pace=PACE,
    )
    sys.exit(notifier.follow())
