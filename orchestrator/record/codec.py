"""Dataclasses as JSON and back: the rows that are stored.

What is read back may come from anywhere: it is a value of its type, or a `ValueError`. Does not say
where the text is kept (`store.py`), nor what users send (`control/queue.py`).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

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

    `ValueError`: it is none of this kind.
    """
    adapter: TypeAdapter[_Value] = _adapter(cast("Any", kind))
    return adapter.validate_python(json.loads(text))
