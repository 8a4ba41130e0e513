"""Operators on lists of tensors (``_foreach_*``, ``_fused_*``), followed item by item.

Item i of such an operator depends on item i of its lists alone. Items that feed each
other, through any number of operators, belong to one parameter: an optimizer over many
parameters is split along these chains.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step.graph.aliases import node_arguments
from torchspmd.step.graph.argument_checks import check_module
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.nodes import HasGraph, NodeMaker, replace_uses

# A chain goes through places: an item of a list operator, or a node that is an item.
_Place: TypeAlias = tuple[fx.Node, int]
_WHOLE = -1


def is_list_operator(node: fx.Node) -> bool:
    """Whether a node computes on lists, item by item."""
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_foreach_", "_fused_")) and num_items(node) > 0


def is_fused_update(node: fx.Node) -> bool:
    """Whether a node is the whole update of a list of parameters."""
    return is_list_operator(node) and "_fused_" in str(node.target)


def num_items(node: fx.Node) -> int:
    """How long the lists are that a node takes; 0 where they are not of one length."""
    lengths = {len(each) for each in _lists(node) if each}
    return lengths.pop() if len(lengths) == 1 else 0


def _lists(node: fx.Node) -> Iterator[Any]:
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, (list, tuple)):
            yield argument


def item_of(node: fx.Node) -> _Place | None:
    """The list operator and the item that a node takes out of its result."""
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if is_list_operator(source):
        return None if _is_nested(source) else (source, index)
    if source.target is operator.getitem and is_list_operator(_source(source)):
        return _source(source), index
    return None


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _is_nested(node: fx.Node) -> bool:
    """Whether a list operator gives several lists, as the fused optimizers do."""
    first = next(iter(node.meta["val"]), None)
    return isinstance(first, (list, tuple))


def first_items(source: fx.Node) -> list[fx.Node]:
    """What the next list operators take of a node's result, or the node itself."""
    found: dict[fx.Node, None] = {}
    seen, waiting = {source}, [source]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if is_list_operator(user):
                found[node] = None
            elif user.op != "output" and user not in seen:
                seen.add(user)
                waiting.append(user)
    return list(found)


class Chains:
    """Which items of a graph's list operators depend on each other."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[_Place, _Place] = {}
        self.operators = [node for node in graph.nodes if is_list_operator(node)]
        for node in self.operators:
            for each in _lists(node):
                for index, element in enumerate(each):
                    for place in _places(element):
                        self._parent[self._find((node, index))] = self._find(place)

    def chain_of(self, node: fx.Node) -> _Place:
        """The representative of the chain that a node is an item of."""
        return self._find(item_of(node) or (node, _WHOLE))

    def chains_of(self, operator_node: fx.Node) -> list[_Place]:
        """The chain of each item of a list operator."""
        return [
            self._find((operator_node, index))
            for index in range(num_items(operator_node))
        ]

    def _find(self, place: _Place) -> _Place:
        parent = self._parent.setdefault(place, place)
        while parent != (above := self._parent[parent]):
            self._parent[place] = above
            place, parent = parent, above
        return parent


def _places(element: object) -> Iterator[_Place]:
    """Where an item of a list comes from."""
    if not isinstance(element, fx.Node):
        return
    if isinstance(element.meta.get("val"), torch.Tensor):
        yield item_of(element) or (element, _WHOLE)
        return
    # A number that was read from an item, such as a step count: follow it back to there.
    waiting, seen = [element], {element}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            place = item_of(source)
            if place is not None:
                yield place
            elif source not in seen and source.op == "call_function":
                seen.add(source)
                waiting.append(source)


def split_by_group(
    graph: fx.Graph, group_of: Callable[[_Place], Hashable], chains: Chains
) -> int:
    """Cut every list operator into the items of each group of chains, all at once.

    Returns:
        How many operators were cut; those whose items are all in one group stay.
    """
    groups = {
        node: [group_of(chain) for chain in chains.chains_of(node)]
        for node in chains.operators
    }
    cut = [node for node, found in groups.items() if len(set(found)) > 1]
    for node in cut:
        _cut(graph, node, groups[node])
    return len(cut)


def _cut(graph: fx.Graph, node: fx.Node, groups: list[Hashable]) -> None:
    members: dict[Hashable, list[int]] = {}
    position = []
    for item, group in enumerate(groups):
        own = members.setdefault(group, [])
        position.append(len(own))
        own.append(item)
    with graph.inserting_before(node):
        pieces = {group: _piece(graph, node, own) for group, own in members.items()}
    parts = {group: _parts(graph, node, piece) for group, piece in pieces.items()}
    items: dict[fx.Node, fx.Node] = {}
    for getter in _item_getters(node):
        index = getter.args[1]
        assert isinstance(index, int)
        source = parts[groups[index]][_source(getter)]
        with graph.inserting_before(getter):
            new = graph.call_function(operator.getitem, (source, position[index]))
        new.meta = dict(getter.meta)
        items[getter] = new
    replace_uses(items)
    getters = dict.fromkeys([*node.users, *(g for u in node.users for g in u.users)])
    for getter in reversed(getters):
        if not getter.users:
            graph.erase_node(getter)
    graph.erase_node(node)


def _piece(graph: fx.Graph, node: fx.Node, indices: list[int]) -> fx.Node:
    """The same operator on some of its items."""
    count = num_items(node)
    packed = _packed_numbers(node)

    def some(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)) and len(argument) == count:
            return [argument[index] for index in indices]
        if isinstance(argument, fx.Node) and argument is packed:
            return _picked(node, packed, indices)
        return argument

    assert callable(node.target)
    piece = graph.call_function(
        node.target,
        tuple(some(argument) for argument in node.args),
        {name: some(argument) for name, argument in node.kwargs.items()},
    )
    piece.meta = dict(node.meta)
    value = node.meta["val"]
    nested = _is_nested(node)
    piece.meta["val"] = [some(each) for each in value] if nested else some(value)
    return piece


def _packed_numbers(node: fx.Node) -> fx.Node | None:
    """The tensor in which a list operator takes a number for each item."""
    scalars = node_arguments(node).get("scalars")
    return scalars if isinstance(scalars, fx.Node) else None


def _picked(node: fx.Node, packed: fx.Node, indices: list[int]) -> fx.Node:
    """The numbers of some items, in one tensor again."""
    make = NodeMaker(node.graph, owner_of(node))
    aten = torch.ops.aten
    parts = [make.call(aten.slice.Tensor, packed, 0, i, i + 1) for i in indices]
    return make.call(aten.cat.default, parts)


def _item_getters(node: fx.Node) -> list[fx.Node]:
    if not _is_nested(node):
        return list(node.users)
    return [getter for part in node.users for getter in part.users]


def _parts(graph: fx.Graph, node: fx.Node, piece: fx.Node) -> dict[fx.Node, fx.Node]:
    """What items are taken from, and the same of a piece: its lists, or itself."""
    if not _is_nested(node):
        return {node: piece}
    found = {}
    for part in node.users:
        which = part.args[1]
        assert isinstance(which, int)
        with graph.inserting_before(node):
            new = graph.call_function(operator.getitem, (piece, which))
        new.meta = {**part.meta, "val": piece.meta["val"][which]}
        found[part] = new
    return found


# ----------------------------------------------------------------------------
# Fused and foreach optimizers in a graph: operator, step counters, new values.

# Fused optimizers, whose second argument holds the gradients.
_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
# Which argument holds the step counters.
_COUNTERS = {"_fused_adam": 5, "_fused_adamw": 5, "_fused_adagrad": 3}


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """One fused optimizer operator and the nodes that unpack its new values."""

    optim_node: fx.Node
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class StepIncrement:
    """The operator that adds one to the step counters; None for an optimizer without."""

    add_node: fx.Node | None


@dataclass(frozen=True, slots=True)
class FusedOptimizerBlock:
    """A fused optimizer and the increment of its counters."""

    step: StepIncrement
    optim: FusedOptimizer


def get_all_fused_optimizer_blocks(
    gm: HasGraph, optim_ops: str | Iterable[str]
) -> list[FusedOptimizerBlock]:
    """The blocks of every optimizer operator whose name begins with one of these.

    ``_fused_adam`` also finds ``_fused_adamw``. A foreach optimizer is found by the
    operator that makes the new parameters (``_foreach_addcdiv`` for Adam).
    """
    check_module("get_all_fused_optimizer_blocks", gm=gm)
    names = tuple(optim_ops) if isinstance(optim_ops, (list, tuple)) else (optim_ops,)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"get_all_fused_optimizer_blocks(optim_ops={optim_ops!r}): pass the name of an "
            "operator, such as '_fused_adam', or a list of names."
        )
    return [
        FusedOptimizerBlock(
            StepIncrement(_find_increment(node)),
            FusedOptimizer(node, tuple(node.users)),
        )
        for node in gm.graph.nodes
        if node.op == "call_function" and _name(node).startswith(names)
    ]


def gradients_of(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """The gradients that a fused optimizer takes; None for any other operator."""
    if _name(node).partition(".")[0].removesuffix("_") not in _FUSED:
        return None
    found = node.args[1]
    assert isinstance(found, (list, tuple)), type(found)
    return tuple(each for each in found if isinstance(each, fx.Node))


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _find_increment(optimizer: fx.Node) -> fx.Node | None:
    """The increment whose items are the optimizer's step counters."""
    place = _COUNTERS.get(_name(optimizer).partition(".")[0].removesuffix("_"))
    if place is None:
        return None
    counters = optimizer.args[place]
    assert isinstance(counters, (list, tuple)), type(counters)
    for counter in counters:
        assert isinstance(counter, fx.Node), type(counter)
        source = item_of(counter)
        node = counter if source is None else source[0]
        if _name(node).startswith(("_foreach_add", "add")):
            return node
    raise CaptureError(
        f"Cannot find step node (foreach_add) for the optimizer node {optimizer.name}."
    )
