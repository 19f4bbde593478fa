"""Values of a queue as JSON and back: rows that are stored, and events.

What is read back may come from anywhere: it is a value of its type, or a `ValueError`. Does not say
where the text is kept (`record/store.py`), nor what users send (`control/queue.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from orchestrator.jobs.model import Record, Submitted

_Value = TypeVar("_Value")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a dataclass
    return TypeAdapter(kind)


def as_json(value: object) -> str:
    """Return a dataclass as JSON in ASCII, without what has its default value.

    In ASCII a name of a file that is no UTF-8 comes back, too.
    """
    kind: Any = type(value)
    fields = _adapter(kind).dump_python(value, mode="json", exclude_defaults=True)
    return json.dumps(fields, separators=(",", ":"))


def from_json(kind: type[_Value], text: str) -> _Value:
    """Return a dataclass that `as_json` has written.

    Raises:
        ValueError: It is none of this kind.
    """
    adapter: TypeAdapter[_Value] = _adapter(cast("Any", kind))
    return adapter.validate_python(json.loads(text))


def event_of(record: Record) -> tuple[str, str | None, Mapping[str, Any]]:
    """Return how a record is told of in the event log: the event, the slot, and the details."""
    kind: Any = type(record)
    fields: dict[str, Any] = _adapter(kind).dump_python(record, mode="json")
    details = {key: value for key, value in fields.items() if value is not None}
    if isinstance(record, Submitted):
        details["job"] = record.job.name
    return event_name(kind), details.get("job"), details


def event_name(kind: type[Record]) -> str:
    """Return the event of a kind of record, such as `job_attempt_ended`."""
    words = "".join(f"_{each.lower()}" if each.isupper() else each for each in kind.__name__)
    return f"job{words}"
