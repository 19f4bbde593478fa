"""Sends one message to all addresses at once through apprise, and waits for a deadline.

Neither results nor logs hold a secret of an address. Retries nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from orchestrator.view.notify.message import MessageText

DEADLINE_S: Final = 20.0

#: Severity -> what apprise calls it.
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}
_REASON_MOST: Final = 200

# Without a handler, Python prints their warnings, which may hold addresses.
for _name in ("apprise", "urllib3"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of a message at one address."""

    number: int
    """Of the address, counted from 1."""
    name: str
    """Service and host, without user, password, token or path."""
    reason: str | None
    """Why it was not taken; `None`: it was."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name}  {'taken' if self.reason is None else f'not taken: {self.reason}'}"


def deliver(
    urls: Sequence[str], message: MessageText, deadline_s: float = DEADLINE_S
) -> tuple[Delivery, ...]:
    """Return what became of the message at each address, after `deadline_s` at the latest."""
    import apprise  # noqa: PLC0415 - an extra, and it takes half a second

    # In memory: else some services keep what they know of an address in files.
    asset = apprise.AppriseAsset(
        storage_mode=apprise.PersistentStoreMode.MEMORY, secure_logging=True
    )
    services = [
        apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True) for url in urls
    ]
    known = apprise.Apprise([service for service in services if service is not None], asset=asset)
    sent = known.notify(
        title=message.title,
        body=message.body,
        notify_type=_TYPES[message.severity],
        body_format="text",
        timeout=deadline_s,
    )
    results = iter(sent.results)
    return tuple(
        _delivery(number, url, None if service is None else next(results, None))
        for number, (url, service) in enumerate(zip(urls, services, strict=True), start=1)
    )


def _delivery(number: int, url: str, result: Any) -> Delivery:  # noqa: ANN401 - a class of apprise
    if result is None:
        reason = "it is no address that apprise knows"
        return Delivery(number=number, name=f"address {number}", reason=reason)
    # What stands before the first slash: apprise shows paths and parameters of some services as
    # they are.
    shown = re.match(r"[^:]+://[^/?]*", str(result.url))
    name = shown.group() if shown else str(result.name)
    reasons = [entry.message for entry in result.logs()]
    return Delivery(
        number=number, name=name, reason=None if result else _harmless(reasons, url, name)
    )


def _harmless(reasons: Sequence[str], url: str, name: str) -> str:
    """Return the last reason without any word of the address that is not in its name."""
    text = reasons[-1] if reasons else "it was not taken"
    words = set(re.split(r"[\s/:@?&=+,]+", f"{url} {unquote(url)}"))
    for word in sorted(words, key=len, reverse=True):
        if len(word) > 2 and word not in name:
            text = text.replace(word, "***")
    return text[:_REASON_MOST]
