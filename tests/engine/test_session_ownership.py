"""Only engine/session.py changes a `Session`, and only engine/slice_stats.py a `SliceStats`.

The rule is checked in the source of every module that can hold one of them: those of workers/engine, and those that
import from there. In these modules an object changes its own attributes (`self.name = ...`) and nothing else: not those
of another object under whatever name, nor a container that is an attribute of one. So no alias can hide a change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Methods that change a list, dict, set, deque or object in place.
MUTATORS = frozenset(
    """
    add append appendleft clear difference_update discard extend extendleft insert intersection_update pop popitem
    popleft remove reverse rotate setdefault sort symmetric_difference_update update
    __setattr__ __delattr__ __setitem__ __delitem__ __iadd__ __setstate__
    """.split()  # noqa: SIM905 - two dozen quoted names are no easier to read
)

#: Functions that change an attribute of their first argument, or hand out the dict of its attributes.
ATTRIBUTE_FUNCTIONS = frozenset({"setattr", "delattr", "vars"})

#: A class elsewhere that inherits one of these could change it as `self`.
OWNED = frozenset({"Session", "SliceStats"})


def changes(source: str) -> list[str]:
    """Return what a module changes in another object than the one whose method it is."""
    tree = ast.parse(source)
    aliases = _aliases_of_attributes(tree)
    found = [ast.unparse(node) for node in ast.walk(tree) if _is_change(node, aliases)]
    return [
        *found,
        *(
            f"class {node.name}({ast.unparse(base)})"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if ast.unparse(base).rpartition(".")[2] in OWNED
        ),
    ]


def _aliases_of_attributes(tree: ast.Module) -> frozenset[str]:
    """Return the local names that stand for an attribute of another object: `events = stats.events`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [pair for target in targets for pair in _paired(target, value)]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case _:
                continue
        names |= {name.id for name, value in pairs if isinstance(name, ast.Name) and _is_foreign_attribute(value)}
    return frozenset(names)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _is_own(node: ast.expr) -> bool:
    """Say whether this is an attribute of `self` itself."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_foreign_attribute(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and not _is_own(node)


def _is_foreign(node: ast.expr, aliases: frozenset[str]) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return _is_foreign_attribute(node) or (isinstance(node, ast.Name) and node.id in aliases)


def _is_change(node: ast.AST, aliases: frozenset[str]) -> bool:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            change = _is_foreign_attribute(node)
        case ast.Attribute(attr="__dict__"):
            change = True
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
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
            if path.parent == ROOT / "workers/engine" or "workers.engine" in path.read_text(encoding="utf-8"):
                yield path


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_changes_an_object_that_is_not_its_own(path: Path) -> None:
    found = changes(path.read_text(encoding="utf-8"))
    assert not found, "call a method of the object instead"


def test_the_modules_in_question_are_all_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in modules()}
    assert {"workers/engine/session.py", "workers/engine/engine.py", "orchestrator/cluster/actor.py"} <= names


@pytest.mark.parametrize(
    "change",
    [
        "session.claim_bytes = 1",
        "session.claim_bytes: int = 1",
        "session.claim_bytes += 1",
        "session.claim_bytes, other = 1, 2",
        "[session.claim_bytes, *session.rest] = values",
        "del session.claim_bytes",
        "for session.claim_bytes in (1, 2): pass",
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
        "stats.events[:] = []",
        "del stats.events[0]",
        "list.append(stats.events, event)",
        "session.resume['size'].update(size=1)",
        "session.thermal.reading = None",
        "self._session.claim_bytes = 1",
        "self._session.seen.add(1)",
        "alias = session; alias.claim_bytes = 1",
        "events = stats.events; events.append(event)",
        "events = stats.events; events += [event]",
        "events, other = stats.events, 1; events[0] = event",
        "(events := stats.events).clear(); events.clear()",
        "(lambda: session.seen.clear())()",
        "class Other(Session): pass",
        "class Other(session.SliceStats): pass",
    ],
)
def test_each_kind_of_change_is_found(change: str) -> None:
    body = "\n    ".join(change.split("; "))
    assert changes(f"def planted(self, session, stats, event):\n    {body}\n")


@pytest.mark.parametrize(
    "reading",
    [
        "self.claim_bytes = 1",
        "self.events.append(1)",
        "self.events[0] = 1",
        "claim_bytes = session.claim_bytes",
        "values = []; values.append(session.claim_bytes)",
        "session.set_claim(1)",
        "stats.event('oom', size=session.last_run.size)",
        "again = replace(session.last_run, size=1)",
    ],
)
def test_what_changes_no_other_object_is_not_found(reading: str) -> None:
    body = "\n    ".join(reading.split("; "))
    assert not changes(f"def harmless(self, session, stats):\n    {body}\n")
