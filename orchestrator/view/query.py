"""Which slots `top` shows, and in which order. Pure.

A filter is a list of terms, and a row must match all of them:

    state:lost          the value contains this text, in upper or lower case
    temp>75  cap<=3GiB  compared with a number; bytes need a unit, shares are in per cent
    pc1                 the slot, node, card, state or reason contains this text
    !node:pc1           the term does not match
    reason:"two words"  quotes keep spaces

Names are keys of a row, names or titles of columns, or the beginning of one of them. Draws nothing
and reads nothing.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from orchestrator.record.model import FIELDS, Field, Row, Value, natural_order, worst_first
from orchestrator.view.slots import COLUMNS

#: Keys that a text without a name is looked for in.
_SEARCHED = ("slot", "node", "gpu_name", "state", "reason")

_TERM = re.compile(r'(?P<term>(?:"[^"]*"|[^\s"])+)\s*')
_NAMED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<sign>:|[<>]=?|!?=)(?P<wanted>.*)", re.DOTALL)
_NUMBER = re.compile(r"(?P<digits>[+-]?(?:\d+\.?\d*|\.\d+))\s*(?P<unit>[A-Za-z%]*)")

_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
#: A unit of bytes is one of these letters, or with `ib` behind it.
_BYTES: Final = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_LONGEST = 500
_Test: TypeAlias = Callable[[Row], bool]


class QueryError(ValueError):
    """A filter or an order that makes no sense.

    Its text is a sentence for the person who typed it.
    """


@dataclass(frozen=True, slots=True)
class Filter:
    """What rows must be like. Without terms every row matches."""

    text: str = ""
    """As it was typed."""
    _tests: tuple[_Test, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def matches(self, row: Row) -> bool:
        """Say whether a row meets all terms."""
        return all(test(row) for test in self._tests)


@dataclass(frozen=True, slots=True)
class Order:
    """By which value rows are put in order: the largest number, or the first word of the alphabet,
    comes first.
    """

    key: str | None = None
    """A key of a row; `None` puts the worst slot first."""
    reverse: bool = False


ALL_ROWS: Final = Filter()
WORST_FIRST: Final = Order()


def parse(text: str) -> Filter:
    """Return the filter that a text describes; `QueryError` if it describes none."""
    stripped = text.strip()
    if len(stripped) > _LONGEST:
        raise QueryError(f"a filter has at most {_LONGEST} characters")
    tests: list[_Test] = []
    at = 0
    while at < len(stripped):
        match = _TERM.match(stripped, at)
        if match is None:
            raise QueryError(f'a quote is not closed: {stripped[at:]}; write reason:"two words"')
        tests.append(_test(match["term"]))
        at = match.end()
    return Filter(stripped, tuple(tests))


def order_of(word: str, *, reverse: bool = False) -> Order:
    """Return the order by a key, a column or the beginning of one.

    `QueryError` if there is none.
    """
    return Order(field_of(word).key, reverse)


def select(rows: Iterable[Row], wanted: Filter, order: Order) -> tuple[Row, ...]:
    """Return the rows that match, in order.

    Unknown values are last either way, and equal ones in order of slots.
    """
    matching = [row for row in rows if wanted.matches(row)]
    if order.key is None:
        worst = worst_first(matching)
        return tuple(reversed(worst)) if order.reverse else worst
    value = FIELDS[order.key].value
    matching.sort(key=lambda row: natural_order(row.slot))
    sortable = [row for row in matching if value(row) is not None]
    is_words = bool(sortable) and isinstance(value(sortable[0]), str)
    sortable.sort(key=lambda row: _sorting_key(value(row)), reverse=order.reverse is is_words)
    return (*sortable, *(row for row in matching if value(row) is None))


def field_of(word: str) -> Field:
    """Return the field of this name, or with a name that begins so.

    `QueryError` for none or several.
    """
    wanted = word.lower()
    by_key = [field for key, field in FIELDS.items() if key == wanted]
    by_column = [FIELDS[each.key] for each in COLUMNS if each.name == wanted]
    by_title = [FIELDS[each.key] for each in COLUMNS if each.title.lower() == wanted]
    if exact := [*by_key, *by_column, *by_title]:
        return exact[0]
    begun = [FIELDS[each.key] for each in COLUMNS if each.name.startswith(wanted)]
    begun += [field for key, field in FIELDS.items() if key.startswith(wanted)]
    found = list({field.key: field for field in begun}.values())
    shown = [field for field in found if any(each.key == field.key for each in COLUMNS)]
    if not found:
        raise QueryError(
            f"nothing is called {word[:40]!r}; names are those of the columns and of summary.json"
        )
    if len(found) > 1 and len(shown) != 1:
        names = ", ".join(field.key for field in found[:6])
        raise QueryError(f"{word[:40]!r} may be {names}; write more of it")
    return shown[0] if shown else found[0]


def _sorting_key(value: Value) -> tuple[str | int, ...] | float:
    return natural_order(value) if isinstance(value, str) else float(value or 0)


def _test(term: str) -> _Test:
    if term.startswith("!") and len(term) > 1:
        test = _test(term[1:])
        return lambda row: not test(row)
    named = _NAMED.fullmatch(term)
    if named is None:
        wanted = _unquoted(term).lower()
        return lambda row: any(wanted in text.lower() for text in _texts(row))
    field, sign, value_text = field_of(named["name"]), named["sign"], _unquoted(named["wanted"])
    if not value_text:
        raise QueryError(f"{term} lacks what to compare with, as in state:lost or temp>75")
    if sign == ":":
        return lambda row: (
            (value := field.value(row)) is not None and value_text.lower() in str(value).lower()
        )
    compare, number = _SIGNS[sign], _number(value_text, field)

    def test_number(row: Row) -> bool:
        value = field.value(row)
        return isinstance(value, int | float) and compare(value, number)

    return test_number


def _texts(row: Row) -> Iterable[str]:
    return (str(value) for key in _SEARCHED if (value := row.value(key)) is not None)


def _unquoted(text: str) -> str:
    return text.replace('"', "")


def _number(text: str, field: Field) -> float:
    """Return a number in the unit of a field's value."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise QueryError(f"{field.key} is compared with a number, not with {text[:40]!r}")
    number, unit = float(match["digits"]), match["unit"].lower()
    if field.unit == "bytes":
        times = _BYTES.get(unit.removesuffix("ib"))
        if times is None:
            raise QueryError(f"{field.key} is in bytes: write a unit, as in {field.key}>3GiB")
        return number * times
    if unit not in {"", field.unit.lower(), "%" if field.unit == "ratio" else ""}:
        raise QueryError(f"{field.key} has the unit {field.unit or 'none'}, not {unit!r}")
    return number / 100 if field.unit == "ratio" else number
