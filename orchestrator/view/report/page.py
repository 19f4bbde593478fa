"""Puts the page of `web` and frozen data into one file that needs no server and asks for nothing.

The file's policy lets run what was put into it, by its hash, and load nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

_PAGE: Final = files("orchestrator.view.web") / "page"
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([\w.]+)">\n')
_SCRIPT: Final = re.compile(r'<script src="([\w.]+)" defer></script>\n')
_ICON: Final = re.compile(r'<link rel="icon" href="[\w.]+">\n')
#: What would end a script element, or make a browser read it differently, whatever the data hold.
_ESCAPES: Final = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def html(data: dict[str, Any], title: str) -> str:
    """Return the page with its data."""
    page = _read("index.html")
    style = "\n".join(_read(name) for name in _STYLE.findall(page))
    script = "\n".join(_read(name) for name in _SCRIPT.findall(page))
    for text in (style, script):
        if re.search(r"</(script|style)", text, re.IGNORECASE):
            raise ValueError("a file of the page would end its own element")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'"
    )
    frozen = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char, escape in _ESCAPES.items():
        frozen = frozen.replace(char, escape)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    page = _ICON.sub("", _SCRIPT.sub("", _STYLE.sub("", page)))
    page = page.replace("<title>OOM orchestrator</title>", f"<title>{_escaped(title)}</title>")
    page = page.replace("</head>", f"{head}</head>", 1)
    end = (
        '<script type="application/json" '
        f'id="frozen">{frozen}</script>\n<script>{script}</script>\n</body>'
    )
    return page.replace("</body>", end, 1)


def write(path: Path, text: str) -> None:
    """Write the file so that a reader never sees half of it.

    `OSError` where that is not possible.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
