"""A ledger as a tree of modules: the rows of every table of communication."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torchspmd.comm.event import GLOBAL
from torchspmd.comm.folding import fold, unfold
from torchspmd.comm.ledger import Ledger


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One row of a table: a module, or several alike.

    Attributes:
        path: The whole path; of several modules, that of the first.
        label: The path from the parent's on, as in ``layers.[0-31]``.
        own: What the modules themselves communicated.
        total: The same with everything inside them.
        children: The modules inside.
    """

    path: str
    label: str
    own: Ledger
    total: Ledger
    children: tuple["ModuleNode", ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "ModuleNode"]]:
        """This row and all below it, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def build_tree(ledger: Ledger, modules: Iterable[str] | None = None) -> ModuleNode:
    """The modules that communicated, under a root that stands for everything.

    Args:
        ledger: What was recorded.
        modules: Paths of further modules to show, in order; by default those around the
            ones that communicated, but for containers that only number them.

    >>> build_tree(Ledger(), ["GPT", "GPT.layers.0"]).children[0].children[0].label
    'layers.0'
    """
    own = {GLOBAL: Ledger(max_events=0)}
    shown = _around(ledger) if modules is None else modules
    for path in (*shown, *(key.module for key in ledger.rows)):
        own.setdefault(path, Ledger(max_events=0))
    for key, total in ledger.rows.items():
        own[key.module].add_total(key._replace(module=GLOBAL), total)
    children: dict[str, list[str]] = {path: [] for path in own}
    for path in own:
        if path != GLOBAL:
            children[_parent(path, own)].append(path)
    return _node(GLOBAL, GLOBAL, own, children)


def _around(ledger: Ledger) -> list[str]:
    paths = {key.module for key in ledger.rows}
    inside: dict[str, list[str]] = {}
    for key in ledger.rows:
        parts = key.module.split(".")
        for end in range(1, len(parts)):
            inside.setdefault(".".join(parts[:end]), []).append(parts[end])
    return [
        path
        for path, names in inside.items()
        if path in paths or not all(name.isdecimal() for name in names)
    ]


def _parent(path: str, known: Iterable[str]) -> str:
    """The nearest module around it that has a row."""
    while "." in path:
        path = path.rpartition(".")[0]
        if path in known:
            return path
    return GLOBAL


def _node(
    path: str, label: str, own: dict[str, Ledger], children: dict[str, list[str]]
) -> ModuleNode:
    start = 0 if path == GLOBAL else len(path) + 1
    inside = [
        _node(child, child[start:], own, children) for child in _ordered(children[path])
    ]
    total = sum_ledgers([own[path], *(child.total for child in inside)])
    return ModuleNode(path, label, own[path], total, tuple(inside))


def _ordered(paths: list[str]) -> list[str]:
    """As they come, but those of one numbered container together and by number."""
    places: dict[str, int] = {}
    for path in paths:
        name, _, number = path.rpartition(".")
        places.setdefault(name if number.isdecimal() else path, len(places))

    def order(path: str) -> tuple[int, int]:
        name, _, number = path.rpartition(".")
        return (places[name], int(number)) if number.isdecimal() else (places[path], -1)

    return sorted(paths, key=order)


def sum_ledgers(ledgers: Iterable[Ledger], times: int = 1) -> Ledger:
    """One ledger with the totals and notes of all; single events are not kept."""
    total = Ledger(max_events=0)
    for ledger in ledgers:
        for key, amount in ledger.rows.items():
            total.add_total(key, amount * times)
        for text, count in ledger.notes.items():
            total.note(text, count)
    return total


# ----------------------------------------------------------------------------
# Alike layers as one row.


def fold_alike(node: ModuleNode) -> ModuleNode:
    """The tree with numbered children that are equal in everything joined into one row."""
    children = {child.label: fold_alike(child) for child in node.children}
    rows = fold((label, _content(child)) for label, child in children.items())
    joined = []
    for label, _ in rows:
        labels = unfold(label)
        joined.append(_times(replace(children[labels[0]], label=label), len(labels)))
    return replace(node, children=tuple(joined))


def _content(node: ModuleNode) -> tuple[object, ...]:
    inside = tuple((child.label, _content(child)) for child in node.children)
    return frozenset(node.own.rows.items()), inside


def _times(node: ModuleNode, times: int) -> ModuleNode:
    if times == 1:
        return node
    return replace(
        node,
        own=sum_ledgers([node.own], times),
        total=sum_ledgers([node.total], times),
        children=tuple(_times(child, times) for child in node.children),
    )
