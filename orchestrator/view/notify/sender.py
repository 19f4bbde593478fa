"""Sends one message to all addresses from a child process, and ends it after a deadline.

Services have no limit of time that can be trusted: a server that accepts and never answers must
cost seconds, once. Addresses go to the child through its standard input, and come back without
their secrets. Retries nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

DEADLINE_S: Final = 20.0

#: Severity -> what apprise calls it.
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}
_REASON_MOST: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of a letter at one address."""

    number: int
    """Of the address, counted from 1."""
    name: str
    """Service and host, without user, password, token or path."""
    taken: bool
    reason: str = ""
    """Why not."""


def deliver(
    urls: Sequence[str], title: str, body: str, severity: str, deadline_s: float = DEADLINE_S
) -> tuple[Delivery, ...]:
    """Return what became of the letter at each address, after `deadline_s` at the latest."""
    job = {
        "urls": urls,
        "title": title,
        "body": body,
        "type": _TYPES[severity],
        "deadline_s": deadline_s,
    }
    out, why = _by_child(json.dumps(job).encode(), deadline_s)
    deliveries = {
        number: Delivery(number=number, name=f"address {number}", taken=False, reason=why)
        for number in _numbers(urls)
    }
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # cut off by the deadline
            delivery = Delivery(**json.loads(line))
            deliveries[delivery.number] = (
                delivery if delivery.taken or delivery.reason else replace(delivery, reason=why)
            )
    return tuple(deliveries.values())


def _by_child(job: bytes, deadline_s: float) -> tuple[bytes, str]:
    """Return what the child said of a job, and why it said no more."""
    command = [sys.executable, "-m", __name__]
    try:
        # In a session of its own: a Ctrl-C in the terminal must not cut a delivery in two.
        child = subprocess.Popen(  # noqa: S603 - this very module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as failure:
        return b"", f"the process that sends cannot be started: {failure.strerror}"
    with child:
        try:
            out, _ = child.communicate(job, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
            return out, f"no answer within {deadline_s:g} s"
        finally:
            child.kill()
    return out, f"the process that sends ended with exit code {child.returncode}"


def _numbers(urls: Sequence[str]) -> range:
    return range(1, len(urls) + 1)


def _main() -> None:
    """Send the job on standard input.

    Say what became of it, a line for each address as soon as it is known.
    """
    job = json.load(sys.stdin)
    signal.alarm(int(job["deadline_s"]) + 5)  # should the parent be killed
    with ThreadPoolExecutor(max_workers=len(job["urls"])) as pool:
        list(
            pool.map(
                lambda number: _send(number, job["urls"][number - 1], job), _numbers(job["urls"])
            )
        )


def _send(number: int, url: str, job: dict[str, Any]) -> None:
    import apprise  # noqa: PLC0415 - an extra, and it takes half a second

    # In memory: else some services keep what they know of an address in files.
    asset = apprise.AppriseAsset(
        storage_mode=apprise.PersistentStoreMode.MEMORY, secure_logging=True
    )
    service = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
    if service is None:
        _say(
            Delivery(
                number=number,
                name=f"address {number}",
                taken=False,
                reason="it is no address that apprise knows",
            )
        )
        return
    # What stands before the first slash: apprise shows paths and parameters of some services as
    # they are.
    shown = re.match(r"[^:]+://[^/?]*", str(service.url(privacy=True)))  # type: ignore[no-untyped-call]
    name = shown.group() if shown else str(service.service_name)
    _say(Delivery(number=number, name=name, taken=False))
    sender = apprise.Apprise(asset=asset)
    sender.add(service)
    result = sender.notify(
        title=job["title"], body=job["body"], notify_type=job["type"], body_format="text"
    )
    reasons = [entry.message for entry in result.logs()]
    _say(
        Delivery(
            number=number,
            name=name,
            taken=bool(result),
            reason="" if result else _harmless(reasons, url, name),
        )
    )


def _harmless(reasons: Sequence[str], url: str, name: str) -> str:
    """Return the last reason without any word of the address that is not in its name."""
    text = reasons[-1] if reasons else "it was not taken"
    for word in sorted(
        set(re.split(r"[\s/:@?&=+,]+", f"{url} {unquote(url)}")), key=len, reverse=True
    ):
        if len(word) > 2 and word not in name:
            text = text.replace(word, "***")
    return text[:_REASON_MOST]


def _say(delivery: Delivery) -> None:
    sys.stdout.write(json.dumps(asdict(delivery)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
