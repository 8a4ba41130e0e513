"""Outputs keep memory of their own: new states are written where the old ones lie."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import memory_root, operator_of, view_source
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
    written_state,
)
from torchspmd.step.legality.edit import Edit, Problem, output_name
from torchspmd.step.legality.values import (
    Call,
    Fakes,
    Layouts,
    Reader,
    ValueTable,
    integers,
    read_call,
    split_arguments,
    tensor_of,
)

_OVERWRITTEN = (
    "Keep the copy: the state is written back before the caller sees the output."
)
_SHARED = "Keep the copy: a write into one of them would change the other."


def check_output_memory(
    edit: Edit, elements: Callable[[fx.Node], Hashable]
) -> list[Problem]:
    """No output newly lies in an input, or in another output.

    Args:
        edit: The edit.
        elements: Which elements a node of the edited graph holds; parts of one bucket
            lie in the same memory without touching each other.
    """
    return [*_in_inputs(edit), *_shared(edit, elements)]


def _in_inputs(edit: Edit) -> Iterator[Problem]:
    """An input belongs to the caller, and a state among them is overwritten."""
    holders = written_state(edit.after)
    states = set(holders.values())
    old = output_values(edit.before)
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node):
            continue
        memory = memory_root(value)
        is_written = memory in states
        is_state = place in holders  # and is copied to where it belongs
        is_others = is_written or (not is_state and _is_callers(memory))
        if not is_others or memory is holders.get(place):
            continue
        was = old[place]
        if isinstance(was, fx.Node) and memory_root(was) is edit.old.get(memory):
            continue
        what = "gets a new value" if is_written else "belongs to the caller"
        text = (
            f"{output_name(edit.after, place)} now lies in the memory of "
            f"{readable_name(memory)}, which {what}"
        )
        yield Problem("memory", text, _OVERWRITTEN if is_written else _SHARED)


def _is_callers(memory: fx.Node) -> bool:
    """Whether it is an input of a captured step; graphs made by hand say nothing."""
    is_known = memory.op == "placeholder" and ROLE_KEY in memory.meta
    return is_known and _may_be_tensor(memory)


def _may_be_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(value, torch.Tensor)


def _shared(edit: Edit, elements: Callable[[fx.Node], Hashable]) -> Iterator[Problem]:
    """A state's next value may become the memory of the state; others are handed out.

    Only two states may share: what does not lie in its own place is copied there.
    """
    found: dict[fx.Node, dict[Hashable, int]] = {}  # by memory: its parts, one each
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node) or not _may_be_tensor(value):
            continue
        memory = memory_root(value)
        parts = found.setdefault(memory, {})
        part = None if value is memory else elements(value)  # None for all of it
        keys = list(parts) if part is None else [None, part]
        touched = [parts[key] for key in keys if key in parts]
        first = next((each for each in touched if _is_new(edit, each, place)), None)
        if first is not None:
            names = [output_name(edit.before, each) for each in (first, place)]
            text = f"{names[0]} and {names[1]} now lie in the same memory"
            yield Problem("memory", text, _SHARED)
        parts.setdefault(part, place)


def _is_new(edit: Edit, first: int, place: int) -> bool:
    """Whether two outputs had memory of their own, and one of them is handed out."""
    roles, old = roles_of(edit.after), output_values(edit.before)
    if roles[first].kind is roles[place].kind is OutputKind.STATE:
        return False
    one, two = old[first], old[place]
    if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
        return False
    return memory_root(one) is not memory_root(two)


# ----------------------------------------------------------------------------
# How tensors lie in memory, for the few operators whose result depends on it.
#
# Values do not say how their elements lie. ``as_strided`` reads elements by their places in
# memory, and random numbers are given out in the order of memory: such calls also take what
# is known about the layout of their operand, so that a clone in another memory format in
# front of them is not taken for the same. Fused optimizers walk through the memory of a
# parameter, its gradient and its states at once, and take the layouts of all of them.

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


def reads_layout(node: fx.Node) -> bool:
    """Whether what a node computes depends on how its operand lies in memory."""
    operator = operator_of(node)
    if operator is None:
        return False
    signature = _torch.signature_of(operator)
    is_concerned = signature.name in _BY_PLACE or signature.draws
    return is_concerned and isinstance(read_call(node).first, fx.Node)


def walks_memory(node: fx.Node) -> bool:
    """Whether a node goes through the memory of lists of tensors, item by item."""
    operator = operator_of(node)
    name = "" if operator is None else _torch.signature_of(operator).name
    return name.startswith("aten::_fused_")


def layouts_walked(reader: Reader, items: Sequence[Any]) -> list[int]:
    """A value for the layouts of tensors that are walked through together.

    None where they lie in the same way: element i of each then belongs to element i of
    the others, however they lie. Like all layouts, it makes nothing certain.
    """
    shapes = [tensor_of(reader, item) for item in items]
    shape = () if shapes[0] is None else shapes[0][1].shape
    # Numbers, as counts of steps are, lie nowhere else; other shapes are other values.
    walked = {
        reader.layouts.get(item)
        for item, found in zip(items, shapes, strict=True)
        if shape and found is not None and found[1].shape == shape
    }
    if len(walked) < 2 and all(_leaves_no_gaps(shape, each) for each in walked):
        return []
    lying = [reader.layouts.get(item) for item in items]
    return [reader.table.term(f"layouts {lying!r}", None, ())]


def layout_read(reader: Reader, call: Call, layouts: Layouts) -> int:
    """A value for the layout of a call's operand, and for the memory that it lies in.

    It has no parts: where two of them differ, nothing is certain about the results.
    """
    node, chain = call.first, []
    while call.name in _BY_PLACE and (source := view_source(node)) is not None:
        view = read_call(node)
        if view.name not in _KEEPING:
            rest = dict(list(view.arguments.items())[1:])
            chain.append((view.head, split_arguments(reader, rest)))
        node = source
    # Through a view, places outside of it can be read too.
    memory = reader.value(node) if call.name in _BY_PLACE else None
    head = f"layout {layouts[node]!r} of {memory} through {chain!r}"
    return reader.table.term(head, None, ())


def find_layouts(table: ValueTable, graph: fx.Graph, fakes: Fakes) -> Layouts:
    """The layout of each node's value, as far as it is known.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> find_layouts(ValueTable(), graph, {x: torch.empty(3, 2).t()})[x]
    (1, 2)
    """
    layouts: dict[fx.Node, Hashable] = {}
    for node in graph.nodes:
        fake = fakes.get(node)
        is_known = fake is not None
        layouts[node] = _strides(fake) if is_known else _unknown(table, node, layouts)
    return layouts


def _unknown(table: ValueTable, node: fx.Node, layouts: Layouts) -> Hashable:
    around = (str(node.target), repr(node.args), repr(node.kwargs))
    follows = tuple(layouts[each] for each in node.all_input_nodes)
    # By number: written out, layouts of layouts would grow without end.
    return "unknown", table.term("unknown layout", (*around, follows), ())


def _leaves_no_gaps(shape: Sequence[Any], strides: Hashable) -> bool:
    """Whether memory with these strides, in short, holds each element once, and no more."""
    sizes = integers([size for size in shape if size != 1])
    if sizes is None or not isinstance(strides, tuple) or len(strides) != len(sizes):
        return False
    if integers(strides) is None:
        return False
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True), key=_first):
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
