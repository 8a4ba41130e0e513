"""A ledger as a tree of modules, with alike layers folded into one row."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torchspmd.comm import GLOBAL, Key, Ledger, Total

# What two modules must have in common, place by place, to be shown as one row.
_Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One row: a module, or several alike.

    Attributes:
        label: What to print, relative to the parent, as in ``layers.[0-31].mlp``.
        times: How many modules the row stands for.
        own: Communication of the modules themselves, by phase.
        total: The same with everything inside them.
        children: The modules inside.
        signature: Equal for rows that can be folded into one.
    """

    label: str
    times: int
    own: dict[str, Total]
    total: dict[str, Total]
    children: tuple["ModuleNode", ...]
    signature: _Signature

    def sum(self) -> Total:
        """All phases, everything inside included."""
        return sum(self.total.values(), Total())

    def own_count(self) -> int:
        """How many communications the modules did themselves."""
        return sum(total.count for total in self.own.values())


@dataclass(slots=True)
class _Draft:
    """A module path while the tree is built."""

    rows: list[tuple[Key, Total]] = field(default_factory=list)
    children: dict[str, "_Draft"] = field(default_factory=dict)


def build_tree(ledger: Ledger) -> ModuleNode:
    """The modules that communicate, under a root that stands for everything.

    >>> build_tree(Ledger()).label
    'Global'
    """
    root = _Draft()
    for key, total in ledger.rows.items():
        place = root
        for part in [] if key.module == GLOBAL else key.module.split("."):
            place = place.children.setdefault(part, _Draft())
        place.rows.append((key, total))
    return _finish(GLOBAL, root)


def _finish(label: str, draft: _Draft) -> ModuleNode:
    children = _fold(_children(draft))
    own = _by_phase(draft.rows)
    total = dict(own)
    for child in children:
        for phase, amount in child.total.items():
            total[phase] = total.get(phase, Total()) + amount
    details = frozenset(
        (key.kind, key.axis, key.dtype, key.phase, key.implicit, amount)
        for key, amount in draft.rows
    )
    inside = tuple((child.label, child.times, child.signature) for child in children)
    return ModuleNode(label, 1, own, total, tuple(children), (details, inside))


def _children(draft: _Draft) -> list[ModuleNode]:
    """The modules inside; a container that only numbers them is part of their label."""
    nodes = []
    for name, child in draft.children.items():
        numbered = not child.rows and all(part.isdigit() for part in child.children)
        if numbered and child.children:
            nodes += [
                _finish(f"{name}.{number}", inner)
                for number, inner in sorted(
                    child.children.items(), key=lambda item: int(item[0])
                )
            ]
        else:
            nodes.append(_finish(name, child))
    return nodes


def _fold(nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    folded: list[list[ModuleNode]] = []
    for node in nodes:
        if folded and _follows(folded[-1][-1], node):
            folded[-1].append(node)
        else:
            folded.append([node])
    return [_merge(run) for run in folded]


def _follows(first: ModuleNode, second: ModuleNode) -> bool:
    name, _, number = first.label.rpartition(".")
    return (
        number.isdigit()
        and second.label == f"{name}.{int(number) + 1}"
        and first.signature == second.signature
    )


def _merge(run: list[ModuleNode]) -> ModuleNode:
    first = run[0]
    if len(run) == 1:
        return first
    name, _, number = first.label.rpartition(".")
    last = run[-1].label.rpartition(".")[2]
    return replace(_scale(first, len(run)), label=f"{name}.[{number}-{last}]")


def _scale(node: ModuleNode, times: int) -> ModuleNode:
    """The row for that many alike modules."""
    return replace(
        node,
        times=node.times * times,
        own=_scaled(node.own, times),
        total=_scaled(node.total, times),
        children=tuple(_scale(child, times) for child in node.children),
    )


def _scaled(totals: dict[str, Total], times: int) -> dict[str, Total]:
    return {phase: total * times for phase, total in totals.items()}


def _by_phase(rows: Iterable[tuple[Key, Total]]) -> dict[str, Total]:
    sums: dict[str, Total] = {}
    for key, total in rows:
        phase = key.phase.value
        sums[phase] = sums.get(phase, Total()) + total
    return sums
