"""A graph as pieces that a compiler gets, and operators that run as they are.

A compiler fuses neighbours that compute element by element or reduce. Matrix products and
attention are calls of libraries with and without it. So a piece is what lies between such
calls: layers of a model have equal pieces, wherever a schedule put communication, and each
form is compiled once.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import (
    is_view,
    is_wait,
    memory_root,
    operator_of,
    written_nodes,
)
from torchspmd.step.graph.collectives import (
    get_all_comm_blocks,
    is_cheap,
    is_communication,
)
from torchspmd.step.graph.metadata import output_node

_COPY = torch.ops.aten.copy_.default
_EMPTY = torch.ops.aten.new_empty.default
_ALIGNED = 16  # bytes: what vector loads need
_LEAST = 2  # operators: one alone is as fast as it is

# Calls of libraries, which a compiler makes too.
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_ATTENTION = (
    "aten::_scaled_dot_product",
    "aten::_flash_attention",
    "aten::_efficient_attention",
)

# An operator may join a piece that made its input, this many steps before: the sum of a
# gradient stands behind the products that use it. Farther away it would be held for longer.
_WITHIN = 4


class _Kind(Enum):
    PART = auto()  # of a piece
    VIEW = auto()  # of a value: made again wherever it is needed
    ITEM = auto()  # one of several results
    CALL = auto()  # runs as it is
    ORDERED = auto()  # runs as it is, and nothing may pass it


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Operators that are compiled together.

    Attributes:
        nodes: They and the views between them, in order.
        inputs: The values that they take from outside, in the order of their first use.
        outputs: The values that are needed outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def form(self) -> str:
        """What it computes of which inputs: equal pieces have equal forms."""
        names = {node: f"%{n}" for n, node in enumerate((*self.inputs, *self.nodes))}
        lines = [_describe(node.meta["val"]) for node in self.inputs]
        for node in self.nodes:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda each: _Name(names[each])
            )
            lines.append(f"{_target(node)}{args!r}{kwargs!r}")
        lines.append(" ".join(names[node] for node in self.outputs))
        return "\n".join(lines)

    def as_graph(self) -> fx.GraphModule:
        """It as a graph of its own, with numbered names: equal for equal pieces."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for place, source in enumerate(self.inputs):
            copies[source] = graph.placeholder(f"input_{place}")
            copies[source].meta = {"val": source.meta["val"]}
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.call_function(_target(node), args, kwargs)
            copies[node].meta = {"val": node.meta.get("val")}
        graph.output([copies[node] for node in self.outputs])
        return fx.GraphModule({}, graph)


Step = fx.Node | Piece


def find_steps(gm: fx.GraphModule) -> list[Step]:
    """What to run, one after another: pieces, and nodes that run as they are."""
    return _Cut(gm).steps()


def _target(node: fx.Node) -> Any:
    """What a node of a piece calls: one of two operators that give a view by its shape."""
    is_unsafe = node.target is torch.ops.aten._unsafe_view.default
    return torch.ops.aten.view.default if is_unsafe else node.target


class _Name(str):
    """A name that stands in a text without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _describe(value: torch.Tensor) -> str:
    is_aligned = value.storage_offset() * value.element_size() % _ALIGNED == 0
    shape, stride = tuple(value.shape), tuple(value.stride())
    return f"{value.dtype} {value.device} {shape} {stride} {is_aligned}"


class _Cut:
    """A graph that is being cut."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._packing = _find_packing(gm)
        values = (node.meta.get("val") for node in gm.graph.nodes)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._is_on_host = all(each.device.type == "cpu" for each in tensors)
        parts = (n for n in gm.graph.nodes if _is_free(n) and not _is_whole_view(n))
        self._cut_up = set(map(memory_root, parts))
        self._kinds: dict[fx.Node, _Kind] = {}
        for node in gm.graph.nodes:
            self._kinds[node] = self._kind(node)
        self._groups: list[list[fx.Node]] = []
        self._place: dict[fx.Node, int] = {}  # of the group that makes a value
        self._first_open = 0  # the first group that a later operator may join
        self._first_near = 0  # the first one behind which everything is a piece
        self._readers: dict[fx.Node, set[int]] = {}  # of those, by what they read
        # Places of groups that became part of another.
        self._merged: dict[int, int] = {}
        self._written: set[fx.Node] = set()  # inputs that pieces write
        self._segments: list[int] = []  # of each group: nothing is moved to another
        for node in gm.graph.nodes:
            self._add(node)
        for place in reversed(range(len(self._groups))):
            self._move_down(place)

    def steps(self) -> list[Step]:
        """What to run, each view directly before it is needed first."""
        drafts = [each for group in self._groups for each in self._drafts(group)]
        ends = [*drafts, output_node(self._graph)]
        needed = {n for each in ends for s in _sources(each) for n in self._views(s)}
        found: list[Step] = []
        made: set[fx.Node] = set()
        for each in ends:
            views = (view for source in _sources(each) for view in self._views(source))
            for view in views:
                if view not in made and self._kinds[view] is _Kind.VIEW:
                    made.add(view)
                    found.append(view)
            if isinstance(each, Piece):
                outputs = tuple(
                    n for n in each.nodes if n in needed and self._is_new(n)
                )
                found.append(replace(each, outputs=outputs))
            elif each.op != "output":
                found += self._with_items(each)
        return found

    # -- which operators come together

    def _add(self, node: fx.Node) -> None:
        kind = self._kinds[node]
        if node.op in ("placeholder", "get_attr"):
            self._place[node] = -1
        elif kind in (_Kind.VIEW, _Kind.ITEM):
            self._place[node] = max(self._makers(node), default=-1)
        elif kind is _Kind.PART:
            self._add_part(node)
        elif node.op != "output":
            self._place[node] = self._open()
            self._groups[-1].append(node)
            self._first_near = len(self._groups)
            self._readers.clear()
            if kind is _Kind.ORDERED:
                self._first_open = self._first_near

    def _makers(self, node: fx.Node) -> set[int]:
        """The places of the groups that make what a node reads."""
        places = {self._place[source] for source in node.all_input_nodes}
        return {self._merged.get(place, place) for place in places}

    def _add_part(self, node: fx.Node) -> None:
        """Let an operator join the groups that make or read what it reads."""
        makers = self._makers(node)
        latest = max(makers, default=-1)
        read = {self._viewed(source) for source in node.all_input_nodes}
        # A copy stays behind all that reads the old value.
        is_copy = node.target is _COPY
        shared = (each for each in read if is_copy or _is_large(each))
        related = {place for each in shared for place in self._readers.get(each, ())}
        related |= {place for place in makers if place >= self._first_near}
        is_near = latest >= max(self._first_open, len(self._groups) - 1 - _WITHIN)
        if related:
            place = self._merge(sorted(related))
        elif is_near and not is_copy and self._is_piece(latest):
            place = latest
        else:
            place = self._open()
        self._groups[place].append(node)
        self._place[node] = place
        for each in read if place >= self._first_near else ():
            self._readers.setdefault(each, set()).add(place)
        if is_copy:
            self._written.add(node.all_input_nodes[0])

    def _is_piece(self, place: int) -> bool:
        return self._kinds[self._groups[place][0]] is _Kind.PART

    def _open(self) -> int:
        self._groups.append([])
        self._segments.append(self._first_open)
        return len(self._groups) - 1

    def _move_down(self, place: int) -> None:
        """Let an operator that is alone join the one group that reads it, if it is near."""
        group = self._groups[place]
        if len(group) != 1 or self._kinds[group[0]] is not _Kind.PART:
            return
        (node,) = group
        if any(memory_root(source) in self._written for source in node.all_input_nodes):
            return  # it might read the new value
        readers = set(_readers(node))
        if any(self._kinds[each] is not _Kind.PART for each in readers):
            return
        found = {self._place[each] for each in readers}
        places = {self._merged.get(each, each) for each in found}
        if len(places) != 1:
            return
        (later,) = places
        is_near = later - place <= _WITHIN
        if is_near and self._segments[later] == self._segments[place]:
            self._groups[later].insert(0, node)
            self._place[node] = later
            group.clear()

    def _merge(self, places: Sequence[int]) -> int:
        """Make one group of some that follow each other and need nothing of each other."""
        first, *others = places
        for place in others:
            moved, self._groups[place] = self._groups[place], []
            self._groups[first] += moved
        self._merged.update(dict.fromkeys(others, first))
        for place, into in self._merged.items() if others else ():
            self._merged[place] = first if into in others else into
        for where in self._readers.values() if others else ():
            if not where.isdisjoint(others):
                where.difference_update(others)
                where.add(first)
        return first

    def _viewed(self, node: fx.Node) -> fx.Node:
        """The value that a view of all of it shows."""
        while self._kinds[node] is _Kind.VIEW and _is_whole_view(node):
            node = node.all_input_nodes[0]
        return node

    # -- what a piece takes, makes and gives

    def _drafts(self, group: Sequence[fx.Node]) -> Sequence[Step]:
        """A piece, or the operators of one that is not worth it."""
        if len(group) < _LEAST or all(node.target is _COPY for node in group):
            return group
        own = set(group)
        nodes: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def is_inside(node: fx.Node) -> bool:
            if node in own or node in nodes:
                return True
            is_derived = self._kinds[node] in (_Kind.VIEW, _Kind.ITEM)
            return is_derived and any(map(is_inside, node.all_input_nodes))

        def take(node: fx.Node) -> None:
            if node in nodes or node in inputs:
                return
            is_view = self._kinds[node] is _Kind.VIEW and _is_whole_view(node)
            if is_view or is_inside(node):
                for source in node.all_input_nodes:
                    take(source)
                nodes[node] = None
            else:
                inputs[node] = None

        for node in group:
            take(node)
            for item in _items_of(node):
                take(item)
        return (Piece(tuple(nodes), tuple(inputs), ()),)

    def _views(self, node: fx.Node) -> Iterator[fx.Node]:
        """A value that is needed and, if it is a view, what it views, that first."""
        if self._kinds[node] is _Kind.VIEW:
            for source in node.all_input_nodes:
                yield from self._views(source)
        yield node

    def _is_new(self, node: fx.Node) -> bool:
        """Whether a value has memory of its own: a tensor that an operator made."""
        is_made = self._kinds[node] in (_Kind.PART, _Kind.ITEM)
        return is_made and isinstance(node.meta.get("val"), torch.Tensor)

    def _with_items(self, node: fx.Node) -> Iterator[fx.Node]:
        """A node and what is taken out of its results, so that the rest can go."""
        yield node
        for item in _items_of(node):
            if self._kinds[item] is _Kind.ITEM:
                yield item

    # -- which operators a compiler gets

    def _kind(self, node: fx.Node) -> _Kind:
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node), type(source)
            is_part = self._kinds[source] is _Kind.VIEW
            return _Kind.VIEW if is_part else _Kind.ITEM
        target = operator_of(node)
        if target is None:
            return _Kind.ORDERED if node.op.startswith("call_") else _Kind.CALL
        if is_wait(node) or is_communication(node):
            return _Kind.ORDERED
        if written_nodes(node) and not self._may_copy(node):
            return _Kind.ORDERED
        if _is_free(node):
            return _Kind.VIEW
        return _Kind.PART if self._is_compiled(node, target) else _Kind.CALL

    def _may_copy(self, node: fx.Node) -> bool:
        """Whether a write is a copy into an input that is neither read later nor cut up."""
        if node.target is not _COPY:
            return False
        target = node.args[0]
        assert isinstance(target, fx.Node), type(target)
        if node.users or target.op != "placeholder" or target in self._cut_up:
            return False
        return not any(node < each and each.op != "output" for each in _readers(target))

    def _is_compiled(self, node: fx.Node, target: _torch.OpOverload) -> bool:
        name = _torch.packet_name(target)
        if not name.startswith(("aten::", "prims::")) or node in self._packing:
            return False
        if _is_library_call(node, name) or not _is_plain((node.args, node.kwargs)):
            return False
        made = [] if node.target is _COPY else _tensors(node)
        taken = [_tensors(source) for source in node.all_input_nodes]
        if made is None or None in taken:
            return False
        # A kernel for the host in a graph for a GPU takes longest to compile.
        return self._is_on_host or all(each.device.type != "cpu" for each in made)


def _find_packing(gm: fx.GraphModule) -> set[fx.Node]:
    """What packs or unpacks a bucket: copies that differ from bucket to bucket."""
    found = {node for block in get_all_comm_blocks(gm) for node in block.head}
    for node in gm.graph.nodes:
        is_behind = not found.isdisjoint(node.all_input_nodes) and is_cheap(node)
        if is_wait(node) or is_behind or node.target is _EMPTY:
            found.add(node)
    return found


def _sources(step: Step) -> Sequence[fx.Node]:
    return step.inputs if isinstance(step, Piece) else step.all_input_nodes


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read a value or a view of it; the end of the graph, too."""
    for user in node.users:
        if user.target is operator.getitem or _is_free(user):
            yield from _readers(user)
        else:
            yield user


def _is_large(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _items_of(node: fx.Node) -> Iterator[fx.Node]:
    """What is taken out of the results of an operator, lists in it first."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return
    for user in node.users:
        if user.target is operator.getitem:
            yield user
            yield from _items_of(user)


def _is_free(node: fx.Node) -> bool:
    """Whether a node gives a view of one of its inputs, and nothing has to be computed."""
    target = operator_of(node)
    if target is None:
        return False
    name = _torch.packet_name(target)
    if name == "aten::reshape":
        return _can_be_viewed(node)
    return name == "aten::_unsafe_view" or is_view(node)


def _can_be_viewed(reshape: fx.Node) -> bool:
    """Whether a reshape finds its elements where they have to lie."""
    source = reshape.args[0]
    assert isinstance(source, fx.Node), type(source)
    value, made = source.meta.get("val"), reshape.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(made.shape)
    except RuntimeError:
        return False
    return True


def _is_whole_view(node: fx.Node) -> bool:
    """Whether a view begins where its input does, with all of it."""
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if node.target is torch.ops.aten.as_strided.default:
        return False
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return value.numel() >= source.numel()


def _is_library_call(node: fx.Node, name: str) -> bool:
    """Whether a compiler would call a library for an operator, as it is."""
    if name.startswith(_ATTENTION):
        return True
    if name not in _PRODUCTS:
        return False
    # On a GPU the compiler pads products of odd sizes, which are slow.
    sources = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    matrices = [v for v in sources if isinstance(v, torch.Tensor) and v.ndim > 1]
    return not any(
        each.device.type == "cuda" and size * each.element_size() % _ALIGNED
        for each in matrices
        for size in each.shape[-2:]
    )


_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    fx.Node,
)


def _is_plain(argument: Any) -> bool:
    """Whether an argument is written down by its text: no generator, no symbol."""
    if isinstance(argument, (list, tuple)):
        return all(map(_is_plain, argument))
    if isinstance(argument, dict):
        return all(map(_is_plain, argument.values()))
    return isinstance(argument, _CONSTANTS)


def _tensors(node: fx.Node) -> list[torch.Tensor] | None:
    """The tensors that a node gives; None where there are others, or sizes are symbols."""
    value = node.meta.get("val")
    found = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(found, (list, tuple)):
        return None
    leaves, _ = _torch.flatten_tree(list(found))
    flat = [each for each in leaves if each is not None]
    if not all(isinstance(each, torch.Tensor) for each in flat):
        return None
    sizes = (size for each in flat for size in (*each.shape, *each.stride()))
    return flat if all(type(size) is int for size in sizes) else None
