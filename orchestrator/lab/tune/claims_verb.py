"""`tune --claims`: the guides' tables with what this machine knows of each claim.

Measures nothing on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.lab.tune.claims import load
from orchestrator.lab.tune.claims_facts import facts_of
from orchestrator.lab.tune.claims_page import judged, page_json, page_text


def page(runs_dir: Path, say: Callable[[str], None], *, as_json: bool) -> str:
    """Return the page, or the same as JSON; `say` tells what it waits for."""
    claims = load()
    say(f"Computing {len(claims.plan)} memory plans, which takes about half a minute ...")
    shown = judged(claims, facts_of(claims, runs_dir))
    return page_json(shown) if as_json else page_text(claims, shown)
