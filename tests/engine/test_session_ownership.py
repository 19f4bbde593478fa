"""Only engine/session.py changes a `Session`, and only engine/slice_stats.py a `SliceStats`.

The rule is checked in the source of every module that can hold one of them: those of
workers/engine, and those that import from there. In these modules an object changes its own
attributes (`self.name = ...`) and nothing else: not those of another object under whatever name,
nor a container that is an attribute of one. So no alias can hide a change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scene import ROOT

#: Methods that change a list, dict, set, deque or object in place.
MUTATORS = frozenset(
    """
    add append appendleft clear difference_update discard extend extendleft insert intersection_update pop popitem
    popleft remove reverse rotate setdefault sort symmetric_difference_update update
    __setattr__ __delattr__ __setitem__ __delitem__ __iadd__ __setstate__
    """.split()  # noqa: SIM905 - two dozen quoted names are no easier to read
)

#: Functions that change an attribute of their first argument, or hand out the dict of its
#: attributes.
ATTRIBUTE_FUNCTIONS = frozenset({"setattr", "delattr", "vars"})

#: A class elsewhere that inherits one of these could change it as `self`.
OWNED = frozenset({"Session", "SliceStats"})


def changes(source: str) -> list[str]:
    """Return what a module changes in another object than the one whose method it is."""
    tree = ast.parse(source)
    aliases = _aliases_of_attributes(tree)
    found = [ast.unparse(node) for node in ast.walk(tree) if _is_change(node, aliases)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = [ast.unparse(base) for node in classes for base in node.bases]
    return [*found, *(base for base in bases if base.rpartition(".")[2] in OWNED)]


def _aliases_of_attributes(tree: ast.Module) -> set[str]:
    """Return the local names that may stand for an attribute of another object: `events = stats.events`."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        and any(_is_foreign(value, set()) for value in getattr(node.value, "elts", [node.value]))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def _is_foreign(node: ast.expr | None, aliases: set[str]) -> bool:
    """Say whether this is an attribute of another object than `self`, or a part of one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return not (isinstance(node.value, ast.Name) and node.value.id == "self")
    return isinstance(node, ast.Name) and node.id in aliases


def _is_change(node: ast.AST, aliases: set[str]) -> bool:
    match node:
        case ast.Attribute(attr="__dict__"):
            change = True
        case (
            ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del())
        ):
            change = _is_foreign(node, aliases)
        case ast.AugAssign(target=ast.Name(id=name)):
            change = name in aliases
        case ast.Call(func=ast.Name(id=name)):
            change = name in ATTRIBUTE_FUNCTIONS
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in MUTATORS:
            unbound = isinstance(owner, ast.Name) and owner.id in {"object", "list", "dict", "set"}
            change = unbound or name.startswith("__") or _is_foreign(owner, aliases)
        case _:
            change = False
    return change and not ast.unparse(node).startswith("os.environ")


def modules() -> Iterator[Path]:
    """Yield each module of the product that can hold a session."""
    for package in ("orchestrator", "workers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent == ROOT / "workers/engine" or "workers.engine" in path.read_text(
                encoding="utf-8"
            ):
                yield path


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_changes_an_object_that_is_not_its_own(path: Path) -> None:
    found = changes(path.read_text(encoding="utf-8"))
    assert not found, "call a method of the object instead"


def test_the_modules_in_question_are_all_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in modules()}
    assert {
        "workers/engine/session.py",
        "workers/engine/engine.py",
        "orchestrator/cluster/actor.py",
    } <= names


CHANGES = [
    "session.claim_bytes = 1",
    "session.claim_bytes += 1",
    "session.claim_bytes, other = 1, 2",
    "del session.claim_bytes",
    "with opened() as session.device: pass",
    "setattr(session, 'claim_bytes', 1)",
    "delattr(session, 'claim_bytes')",
    "object.__setattr__(session, 'claim_bytes', 1)",
    "session.__setattr__('claim_bytes', 1)",
    "session.__dict__['claim_bytes'] = 1",
    "vars(session)['claim_bytes'] = 1",
    "stats.events.append(event)",
    "stats.events += [event]",
    "stats.events[0] = event",
    "del stats.events[0]",
    "list.append(stats.events, event)",
    "session.resume['size'].update(size=1)",
    "self._session.claim_bytes = 1",
    "alias = session; alias.claim_bytes = 1",
    "events = stats.events; events.append(event)",
    "events = stats.events; events += [event]",
    "events, other = stats.events, 1; events[0] = event",
    "(events := stats.events).clear(); events.clear()",
    "(lambda: session.seen.clear())()",
    "class Other(Session): pass",
    "class Other(session.SliceStats): pass",
]

READINGS = [
    "self.claim_bytes = 1",
    "self.events.append(1)",
    "self.events[0] = 1",
    "claim_bytes = session.claim_bytes",
    "values = []; values.append(session.claim_bytes)",
    "session.set_claim(1)",
    "stats.event('oom', size=session.last_run.size)",
    "again = replace(session.last_run, size=1)",
]


@pytest.mark.parametrize(
    ("source", "is_change"),
    [*((change, True) for change in CHANGES), *((reading, False) for reading in READINGS)],
)
def test_each_kind_of_change_is_found_and_nothing_else(source: str, is_change: bool) -> None:
    body = "\n    ".join(source.split("; "))
    assert bool(changes(f"def planted(self, session, stats, event):\n    {body}\n")) == is_change
