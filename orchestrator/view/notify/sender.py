"""Sends one message to all addresses, each from a thread of its own, and waits for a deadline.

Services have no limit of time that can be trusted: a thread that is late is left behind, and ends
with the process. Neither results nor logs hold a secret of an address. Retries nothing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
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


@dataclass(slots=True, kw_only=True)
class Delivery:
    """What became of a message at one address; its thread fills it in."""

    number: int
    """Of the address, counted from 1."""
    name: str
    """Service and host, without user, password, token or path."""
    taken: bool = False
    reason: str = ""
    """Why not."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name}  {'taken' if self.taken else f'not taken: {self.reason}'}"


def deliver(
    urls: Sequence[str], message: MessageText, deadline_s: float = DEADLINE_S
) -> tuple[Delivery, ...]:
    """Return what became of the message at each address, after `deadline_s` at the latest."""
    import apprise  # noqa: PLC0415 - an extra, and it takes half a second

    # In memory: else some services keep what they know of an address in files.
    asset = apprise.AppriseAsset(
        storage_mode=apprise.PersistentStoreMode.MEMORY, secure_logging=True
    )
    deliveries, threads = list[Delivery](), list[Thread]()
    for number, url in enumerate(urls, start=1):
        service = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
        delivery = Delivery(number=number, name=_name_of(service, number))
        deliveries.append(delivery)
        if service is None:
            delivery.reason = "it is no address that apprise knows"
            continue
        delivery.reason = f"no answer within {deadline_s:g} s"
        sender = apprise.Apprise(asset=asset)
        sender.add(service)
        threads.append(Thread(target=_send, args=(sender, url, message, delivery), daemon=True))
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return tuple(deliveries)


def _name_of(service: Any, number: int) -> str:  # noqa: ANN401 - a class of apprise
    if service is None:
        return f"address {number}"
    # What stands before the first slash: apprise shows paths and parameters of some services as
    # they are.
    shown = re.match(r"[^:]+://[^/?]*", str(service.url(privacy=True)))
    return shown.group() if shown else str(service.service_name)


def _send(sender: Any, url: str, message: MessageText, delivery: Delivery) -> None:  # noqa: ANN401
    result = sender.notify(
        title=message.title,
        body=message.body,
        notify_type=_TYPES[message.severity],
        body_format="text",
    )
    reasons = [entry.message for entry in result.logs()]
    delivery.reason = "" if result else _harmless(reasons, url, delivery.name)
    delivery.taken = bool(result)


def _harmless(reasons: Sequence[str], url: str, name: str) -> str:
    """Return the last reason without any word of the address that is not in its name."""
    text = reasons[-1] if reasons else "it was not taken"
    words = set(re.split(r"[\s/:@?&=+,]+", f"{url} {unquote(url)}"))
    for word in sorted(words, key=len, reverse=True):
        if len(word) > 2 and word not in name:
            text = text.replace(word, "***")
    return text[:_REASON_MOST]
