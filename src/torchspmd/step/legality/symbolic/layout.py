"""How tensors lie in memory, for the few operators whose result depends on it.

Values do not say how their elements lie. ``as_strided`` reads elements by their places in
memory, and random numbers are given out in the order of memory: such calls also take what
is known about the layout of their operand, so that a clone in another memory format in
front of them is not taken for the same.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.legality.output_memory import looked_at
from torchspmd.step.legality.symbolic.call import (
    Call,
    Reader,
    integers,
    read_call,
    shape_of,
    split_arguments,
)
from torchspmd.step.legality.symbolic.table import ValueTable

_BY_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided",
        "as_strided_copy",
        "as_strided_scatter",
        "is_contiguous",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_storage_offset",
        "sym_stride",
    )
)
_KEEPING = frozenset(
    {"aten::alias", "aten::detach", "_c10d_functional::wait_tensor"}
)  # views of the same places

_STRIDED = frozenset(
    f"aten::{name}" for name in ("as_strided", "empty_strided", "new_empty_strided")
)  # their arguments say how the result lies

Layouts = Mapping[fx.Node, Hashable]


def reads_layout(node: fx.Node) -> bool:
    """Whether what a node computes depends on how its operand lies in memory."""
    operator = operator_of(node)
    if operator is None:
        return False
    signature = _torch.signature_of(operator)
    is_concerned = signature.name in _BY_PLACE or signature.draws
    return is_concerned and isinstance(read_call(node).first, fx.Node)


def layout_read(reader: Reader, call: Call, layouts: Layouts) -> int:
    """A value for the layout of a call's operand, and for the memory that it lies in.

    It has no parts: where two of them differ, nothing is certain about the results.
    """
    node, chain = call.first, []
    while call.name in _BY_PLACE and (source := looked_at(node)) is not None:
        view = read_call(node)
        if view.name not in _KEEPING:
            rest = dict(list(view.arguments.items())[1:])
            chain.append((view.head, split_arguments(reader, rest)))
        node = source
    # Through a view, places outside of it can be read too.
    memory = reader.value(node) if call.name in _BY_PLACE else None
    head = f"layout {layouts[node]!r} of {memory} through {chain!r}"
    return reader.table.term(head, None, ())


@dataclass(frozen=True, slots=True)
class Earlier:
    """The layouts before an edit, and which node of then each node of now was."""

    old: Mapping[fx.Node, fx.Node]
    layouts: Layouts

    def has_moved(self, node: fx.Node, layouts: Layouts) -> bool:
        """Whether what a node takes lay otherwise before."""
        twin = self.old.get(node)
        if twin is None or not self.layouts:
            return False
        was = [self.layouts[each] for each in twin.all_input_nodes]
        now = [layouts[each] for each in node.all_input_nodes]
        return len(was) == len(now) and was != now


def find_layouts(
    table: ValueTable, graph: fx.Graph, earlier: Earlier | None = None
) -> Layouts:
    """The layout of each node's value, as far as can be told from the graph.

    What was written down (``meta["val"]``) is believed only behind operands that lie as
    was written down for them, and as they lay before an edit: a pass may change how a
    clone lies and nothing else.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(3, 2).t()
    >>> kept = graph.call_function(torch.ops.aten.clone.default, (x,))
    >>> kept.meta["val"] = x.meta["val"].clone()
    >>> find_layouts(ValueTable(), graph)[kept]
    (1, 2)
    >>> kept.kwargs = {"memory_format": torch.contiguous_format}
    >>> find_layouts(ValueTable(), graph)[kept]
    (3, 1)
    """
    # Once for each node: an optimizer's result is a list of thousands, read by as many.
    written = {node: _strides(node.meta.get("val")) for node in graph.nodes}
    layouts: dict[fx.Node, Hashable] = {}
    for node in graph.nodes:
        asked = None
        if operator_of(node) is not None:
            asked = _asked(read_call(node), layouts, written)
        if asked is None:
            is_known = all(layouts[n] == written[n] for n in node.all_input_nodes)
            has_moved = earlier is not None and earlier.has_moved(node, layouts)
            is_known = is_known and not has_moved
            asked = written[node] if is_known else _unknown(table, node, layouts)
        layouts[node] = asked
    return layouts


def _unknown(table: ValueTable, node: fx.Node, layouts: Layouts) -> Hashable:
    around = (str(node.target), repr(node.args), repr(node.kwargs))
    follows = tuple(layouts[each] for each in node.all_input_nodes)
    # By number: written out, layouts of layouts would grow without end.
    return "unknown", table.term("unknown layout", (*around, follows), ())


def _asked(call: Call, layouts: Layouts, written: Layouts) -> Hashable | None:
    """The layout that a call's own arguments ask for."""
    if call.name in _STRIDED:
        return _in_short(call.arguments["size"], call.arguments["stride"])
    if "memory_format" not in call.arguments:
        return None
    wanted = call.arguments["memory_format"]
    if wanted is None or wanted == torch.preserve_format:
        return _preserved(call, layouts, written)
    shape = shape_of(call.node.meta.get("val"))
    try:
        made = torch.empty(shape or (), memory_format=wanted, device="meta")
    except RuntimeError:  # not for tensors of this shape
        shape = None
    if shape is None:
        return "format", str(wanted)
    return _in_short(made.shape, made.stride())


def _preserved(call: Call, layouts: Layouts, written: Layouts) -> Hashable | None:
    """A copy lies as its source does, where that leaves no gaps."""
    source: Any = call.first
    if not isinstance(source, fx.Node):
        return None
    was = layouts[source]
    value, made = source.meta.get("val"), call.node.meta.get("val")
    if was != written[source] or not isinstance(value, torch.Tensor):
        return was
    if not isinstance(made, torch.Tensor) or made.shape != value.shape:
        return None
    return was if _is_dense(value) else None


def _is_dense(value: torch.Tensor) -> bool:
    if integers([*value.shape, *value.stride()]) is None:
        return False
    expected = 1
    pairs = zip(value.stride(), value.shape, strict=True)
    for stride, size in sorted((each for each in pairs if each[1] != 1), key=_first):
        if stride != expected:
            return False
        expected *= size
    return True


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _strides(value: object) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_strides, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return _in_short(value.shape, value.stride())


def _in_short(shape: Any, strides: Any) -> Hashable:
    """Strides; those of dimensions of one place say nothing."""
    if integers([*shape, *strides]) is None:
        return repr((shape, strides))
    pairs = zip(shape, strides, strict=False)
    return tuple(stride for size, stride in pairs if size != 1)
