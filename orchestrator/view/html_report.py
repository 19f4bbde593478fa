"""Writes a run as one HTML file: the page of `web` with one document and the courses of all slots.

The file needs no server and no network: its content security policy allows the embedded style and
script, by their hashes, and forbids loading anything. With many slots, courses have fewer buckets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Final

from orchestrator.errors import UsageError
from orchestrator.record.summary import write_file
from orchestrator.view.charts import BUCKETS, course_of_all, courses_of
from orchestrator.view.document import Json, document
from orchestrator.view.look import Watch

_BUCKETS_MOST: Final = 5_000
"""Buckets of all slots together. Each has about 45 numbers, which gives about 1.5 MiB of text."""
_PAGE: Final = files("orchestrator.view.web") / "page"
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([\w.]+)">\n')
_SCRIPT: Final = re.compile(r'<script src="([\w.]+)" defer></script>\n')
_ICON: Final = re.compile(r'<link rel="icon" href="[\w.]+">\n')

#: Escapes for characters of the data that could end the script element or change its parsing.
_ESCAPES: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def report_data(folder: Path) -> Json:
    """Return the document of the run in a folder, and all courses that the page can ask for.

    `NothingStoredError`: the folder has no stored state yet; `ArchiveError`: it cannot be read.
    """
    frame = Watch(folder).read()
    jobs = () if frame.queue is None else frame.queue.standings
    slots = (row.slot for row in frame.snapshot.rows)
    names = [*dict.fromkeys((*slots, *(one.job.name for one in jobs)))]
    buckets = min(BUCKETS, _BUCKETS_MOST // (len(names) or 1))
    return {
        "document": document(replace(frame, alerts=())),  # a reader of a report cannot act on them
        "all": course_of_all(folder),
        "slots": courses_of(folder, names, buckets),
    }


def html(data: Json, title: str) -> str:
    """Return the page with its data embedded."""
    page = _read("index.html")
    style = "\n".join(_read(name) for name in _STYLE.findall(page))
    script = "\n".join(_read(name) for name in _SCRIPT.findall(page))
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'"
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += f"<style>{style}</style>\n"
    end = f'<script type="application/json" id="frozen">{embedded}</script>\n'
    end += f"<script>{script}</script>\n"
    page = _ICON.sub("", _SCRIPT.sub("", _STYLE.sub("", page)))
    page = page.replace("<title>OOM orchestrator</title>", f"<title>{escape(title)}</title>")
    return page.replace("</head>", f"{head}</head>", 1).replace("</body>", f"{end}</body>", 1)


def write_report(path: Path, folder: Path) -> None:
    """Write the run in a folder into one file; `OrchestratorError` if that is not possible."""
    try:
        write_file(path, html(report_data(folder), f"run {folder.name}"))
    except OSError as failure:
        raise UsageError(f"{path} cannot be written: {failure.strerror}") from failure


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
