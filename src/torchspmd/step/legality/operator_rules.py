"""What each operator does to the elements of the tensors that it takes.

An operator that no rule knows stands for itself: the same operator of the same values.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from torchspmd.step.graph.aliases import view_source
from torchspmd.step.legality.values import (
    CAST,
    EVERYWHERE,
    ROWS,
    TUPLE,
    Flat,
    Impossible,
    OpCall,
    Reader,
    Rule,
    Segment,
    Shape,
    Tensor,
    Term,
    Unknown,
    ValueTable,
    are_integers,
    concatenate,
    find_tensor,
    integers,
    kind_of,
    known,
    narrow,
    read_call,
    shape_of,
    split_arguments,
    tensor_of,
)

_Kind = tuple[torch.dtype, torch.device]

# ----------------------------------------------------------------------------
# Operators that give the same elements in another shape.


def _same(reader: Reader, call: OpCall) -> int:
    """Hands its first argument on; clones and casts to the same dtype among them."""
    return tensor_of(reader, call.first).value


def _view(reader: Reader, call: OpCall) -> int:
    """The same elements in the shape that the fake result has."""
    value, shape = tensor_of(reader, call.first)
    asked = call.arguments.get("size", call.arguments.get("shape"))
    size = shape_of(
        _fake(reader, call, f"a shape of {asked} for {prod(shape)} elements")
    )
    if size is None or prod(size) != prod(shape):
        raise Unknown  # or expanded
    return reader.table.flat(size, reader.table.elements(value).segments)


def _fake(reader: Reader, call: OpCall, takes: str) -> Any:
    """What a call gives, without values; where it cannot run, ``takes`` says why."""
    if call.node.all_input_nodes != [call.first]:
        raise Unknown  # sizes that are nodes may be others in another run
    found = reader.fakes.get(call.node)
    if found is None:
        known(reader.fakes.get(call.first))
        raise Impossible(takes)
    return found


def _with_dim(shape: Shape, dim: int, *sizes: int) -> Shape:
    """A shape with other sizes in the place of one dimension."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


VIEWS: dict[str, Rule] = {
    **{
        f"aten::{name}": _view
        for name in (
            *("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten"),
            *("unflatten", "squeeze", "unsqueeze", "expand"),
        )
    },
    **{
        f"aten::{name}": _same
        for name in (
            *("alias", "detach", "clone", "contiguous", "lift_fresh"),
            "lift_fresh_copy",
        )
    },
    "_c10d_functional::wait_tensor": _same,
    "c10d_functional::wait_tensor": _same,
}

# ----------------------------------------------------------------------------
# Operators that take some places of a dimension.

_MOST_SEGMENTS = 4096  # of a concatenation along an inner dimension, at once
_MOST_ROWS = 1 << 18


def narrowed(table: ValueTable, value: int, dim: int, start: int, length: int) -> int:
    """Some places of one dimension of a tensor."""
    shape, segments = table.elements(value)
    if start < 0 or start + length > shape[dim]:
        end = start + length
        raise Impossible(f"places {start} to {end} of dimension {dim} of {list(shape)}")
    if (start, length) == (0, shape[dim]):
        return value
    size = _with_dim(shape, dim, length)
    num_rows = prod(shape[:dim])
    if len(segments) == 1 and segments[0].offset == EVERYWHERE:
        return table.flat(size, (segments[0]._replace(length=prod(size)),))
    if len(segments) == 1 and num_rows > 1 and table[segments[0].atom][0] != ROWS:
        inner = prod(shape[dim + 1 :])
        runs = (start * inner, length * inner, shape[dim] * inner, num_rows)
        return table.flat(size, (_runs(table, segments[0], *runs),))
    if num_rows > _MOST_ROWS:
        raise Unknown
    pieces = table.pieces(value)
    return table.flat(size, narrow(pieces, shape, dim, start, length))


def _runs(
    table: ValueTable, segment: Segment, offset: int, run: int, stride: int, count: int
) -> Segment:
    """Regular runs of one segment; runs of runs are runs of what these were taken of."""
    atom, begin = segment.atom, segment.offset
    inner = table.runs_of(atom)
    if inner and begin == 0 and (inner.length, inner.num) == (stride, count):
        atom, begin, _, stride, _ = inner
    made = table.strided(atom, begin + offset, run, stride, count)
    return Segment(made, 0, run * count)


def _slice(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    names = ("dim", "start", "end", "step")
    dim, start, end, step = (call.arguments[name] for name in names)
    integers([dim, start or 0, end or 0])
    if step != 1:
        raise Unknown
    dim %= len(shape)
    places = range(shape[dim])[slice(start, end)]
    return narrowed(reader.table, value, dim, places.start, len(places))


def _narrow(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    names = ("dim", "start", "length")
    dim, start, length = integers([call.arguments[name] for name in names])
    dim %= len(shape)
    start += shape[dim] if start < 0 else 0
    return narrowed(reader.table, value, dim, start, length)


def _select(reader: Reader, call: OpCall) -> int:
    value, _ = tensor_of(reader, call.first)
    dim, index = integers([call.arguments[name] for name in ("dim", "index")])
    return selected(reader.table, value, dim, index)


def selected(table: ValueTable, value: int, dim: int, index: int) -> int:
    """One place of a dimension of a tensor."""
    shape = table.elements(value).shape
    dim %= len(shape)
    one = narrowed(table, value, dim, index % shape[dim], 1)
    return table.flat(_with_dim(shape, dim), table.elements(one).segments)


def _unbind(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    dim = call.arguments["dim"] % len(shape)
    parts = [selected(reader.table, value, dim, i) for i in range(shape[dim])]
    return reader.table.list_of(parts)


def _split(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    given, dim = call.arguments, call.arguments["dim"] % len(shape)
    sizes = given.get("split_sizes", given.get("split_size", given.get("chunks")))
    total = f"{sum(integers(sizes))} places in all of dimension {dim} of {list(shape)}"
    parts, start = [], 0
    for fake in _fake(reader, call, f"pieces of {total}"):
        length = known(shape_of(fake))[dim]
        parts.append(narrowed(reader.table, value, dim, start, length))
        start += length
    return reader.table.list_of(parts)


# ----------------------------------------------------------------------------
# Operators that put tensors together.


def _cat(reader: Reader, call: OpCall) -> int:
    tensors = _tensors(reader, call.arguments["tensors"])
    # An empty vector may be concatenated with anything.
    parts = [value for value, shape in tensors if shape != (0,)]
    if not parts:
        return tensors[0].value
    return joined(reader.table, parts, call.arguments["dim"])


def _stack(reader: Reader, call: OpCall) -> int:
    tensors = _tensors(reader, call.arguments["tensors"])
    dim = call.arguments["dim"] % (len(tensors[0].shape) + 1)
    longer = [
        reader.table.flat(
            (*shape[:dim], 1, *shape[dim:]), reader.table.elements(value).segments
        )
        for value, shape in tensors
    ]
    return joined(reader.table, longer, dim)


def _tensors(reader: Reader, nodes: Sequence[Any]) -> list[Tensor]:
    """Tensors of one dtype and device, which are not cast when they are joined."""
    tensors = [tensor_of(reader, node) for node in nodes]
    kinds = {kind_of(reader, node) for node in nodes}
    if len(kinds) != 1 or None in kinds:
        raise Unknown
    return tensors


def joined(table: ValueTable, parts: list[int], dim: int) -> int:
    """Tensors one behind the other along a dimension."""
    shapes = [table.elements(part).shape for part in parts]
    dim %= len(shapes[0])
    if len({_with_dim(shape, dim) for shape in shapes}) > 1:
        raise Impossible(f"tensors of shapes {[list(shape) for shape in shapes]}")
    num_rows = prod(shapes[0][:dim])
    size = _with_dim(shapes[0], dim, sum(shape[dim] for shape in shapes))
    if num_rows * len(parts) > _MOST_SEGMENTS and num_rows > 1:
        return table.tensor(table.rows(tuple(parts), num_rows), size)
    widths = [prod(shape[dim:]) for shape in shapes]
    rows = list(zip(map(table.pieces, parts), widths, strict=True))
    return table.flat(size, concatenate(rows, num_rows))


def _pad(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    pad, number = integers(call.arguments["pad"]), call.arguments["value"]
    dtype, _ = known(kind_of(reader, call.first))
    if min(pad, default=0) < 0 or not isinstance(number, (int, float)):
        raise Unknown
    filling = fill_attributes(number, dtype)
    for i in range(0, len(pad), 2):
        dim, shape = len(shape) - 1 - i // 2, reader.table.elements(value).shape
        ends = [_with_dim(shape, dim, length) for length in pad[i : i + 2]]
        before, after = (reader.table.filled(filling, end) for end in ends)
        value = joined(reader.table, [before, value, after], dim)
    return value


def fill_attributes(number: float, dtype: torch.dtype) -> tuple[str, str]:
    """What distinguishes tensors filled with one number.

    >>> fill_attributes(2**53 + 1, torch.int64), fill_attributes(2, torch.float32)
    (('9007199254740993', 'torch.int64'), ('2.0', 'torch.float32'))
    """
    if dtype.is_floating_point or dtype.is_complex:
        return repr(float(number)), str(dtype)
    # As a float a large integer would lose its last bits.
    is_whole = isinstance(number, int) or number.is_integer()
    return repr(int(number) if is_whole else number), str(dtype)


# ----------------------------------------------------------------------------
# Operators that work on each element alone.


def lifted(table: ValueTable, value: int, apply: Callable[[int], int]) -> int:
    """A tensor with a function of single elements applied to each of its segments."""
    segments = [
        Segment(_lift(table, atom, apply), offset, length)
        for atom, offset, length in table.segments(value)
    ]
    return table.flat(table.elements(value).shape, segments)


def _lift(table: ValueTable, atom: int, apply: Callable[[int], int]) -> int:
    """The function applied to every element of one value."""
    runs = table.runs_of(atom)
    if runs is not None:
        return table.strided(_lift(table, runs.base, apply), *runs[1:])
    made = apply(atom)
    table.sizes[made] = table.sizes[atom]
    return made


def elementwise(reader: Reader, call: OpCall) -> int:
    """An elementwise operator on one tensor; other operands are numbers of any kind."""
    signature = call.signature
    if signature is None or not signature.is_elementwise or signature.is_random:
        raise Unknown
    attributes, children = split_arguments(reader, call.arguments)
    shaped = [i for i, child in enumerate(children) if _has_dims(reader.table, child)]
    if len(shaped) != 1:
        raise Unknown
    place = shaped[0]

    def apply(atom: int) -> int:
        operands = (*children[:place], atom, *children[place + 1 :])
        return reader.table.term(call.head, attributes, operands)

    return lifted(reader.table, children[place], apply)


def _has_dims(table: ValueTable, value: int) -> bool:
    flat = table[value]
    return isinstance(flat, Flat) and bool(flat.shape)


def commuted(call: OpCall, children: list[int]) -> list[int]:
    """The operands of a sum or product in one order, since it does not matter."""
    is_sum = call.name == "aten::add" and call.arguments.get("alpha") == 1
    if (is_sum or call.name == "aten::mul") and len(children) == 2:
        return sorted(children)
    return children


# ----------------------------------------------------------------------------
# Casts, fills and permutations.


def _cast(reader: Reader, call: OpCall) -> int:
    value, _ = tensor_of(reader, call.first)
    kind, like = known(kind_of(reader, call.first)), call.arguments.get("other")
    if isinstance(like, fx.Node):
        wanted = known(kind_of(reader, like))
    else:
        dtype = call.arguments.get("dtype") or kind[0]
        device = call.arguments.get("device") or kind[1]
        if not isinstance(dtype, torch.dtype) or isinstance(device, fx.Node):
            raise Unknown
        wanted = dtype, torch.device(device)
    return _as_kind(reader.table, value, kind, wanted)


def _as_kind(table: ValueTable, value: int, kind: _Kind, wanted: _Kind) -> int:
    if kind == wanted:
        return value
    attributes = tuple(map(str, wanted))
    return lifted(table, value, lambda atom: table.cast(atom, attributes))


def _copy(reader: Reader, call: OpCall) -> int:
    """The source in the dtype of what it is copied to."""
    nodes = call.first, call.arguments.get("src")
    to, source = (tensor_of(reader, node) for node in nodes)
    wanted, kind = (known(kind_of(reader, node)) for node in nodes)
    if to.shape != source.shape:
        raise Unknown
    return _as_kind(reader.table, source.value, kind, wanted)


def _fill(number: float | None, reader: Reader, call: OpCall) -> int:
    """A tensor with one number everywhere; None for a number that is an argument."""
    given = call.arguments
    filling = given.get("fill_value", given.get("value")) if number is None else number
    if not isinstance(filling, (int, float)):
        raise Unknown
    size = given.get("size")
    shape = tensor_of(reader, call.first).shape if size is None else integers(size)
    dtype = given.get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype, _ = known(kind_of(reader, call.node) or kind_of(reader, call.first))
    return reader.table.filled(fill_attributes(filling, dtype), shape)


def _permute(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    places = list(range(len(shape)))
    if call.name == "aten::permute":
        places = [dim % len(shape) for dim in integers(call.arguments["dims"])]
    elif shape and call.name == "aten::transpose":
        one, two = (call.arguments[name] for name in ("dim0", "dim1"))
        places[one], places[two] = places[two], places[one]
    else:
        places.reverse()
    if sorted(places) != list(range(len(shape))):
        raise Unknown
    return _permuted(reader.table, value, tuple(places))


def _permuted(table: ValueTable, value: int, places: Shape) -> int:
    """A tensor with its dimensions in another order."""
    value, places = _origin(table, value, places)
    base = table.elements(value)
    shape = tuple(base.shape[place] for place in places)
    moving = [place for place in places if base.shape[place] != 1]
    if moving == sorted(moving):
        return table.flat(shape, base.segments)
    return table.tensor(table.term("permute", places, (value,)), shape)


def _origin(table: ValueTable, value: int, places: Shape) -> tuple[int, Shape]:
    """What a tensor was permuted from, and both permutations as one."""
    flat = table.elements(value)
    term: Any = table[flat.segments[0].atom] if len(flat.segments) == 1 else None
    if not isinstance(term, Term) or term.head != "permute":
        return value, places
    origin, earlier = table.elements(term.children[0]), term.attributes
    if tuple(origin.shape[place] for place in earlier) != flat.shape:
        return value, places
    return term.children[0], tuple(earlier[place] for place in places)


# ----------------------------------------------------------------------------
# Operators on lists of tensors: item i depends on item i of each list alone.

_TO_NUMBERS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def getitem(reader: Reader, call: OpCall) -> int:
    """One value out of a list of values."""
    source, index = (call.arguments[name] for name in ("0", "1"))
    term = reader.table[reader.value(source)]
    if not isinstance(term, Term) or term.head != TUPLE or type(index) is not int:
        raise Unknown
    if not -len(term.children) <= index < len(term.children):
        raise Impossible(f"item {index} of {len(term.children)}")
    return term.children[index]


def _items(call: OpCall) -> tuple[list[str], list[dict[str, Any]]]:
    """The arguments that are lists, and for each item all arguments with its own."""
    given = call.arguments
    lists = [name for name, each in given.items() if isinstance(each, (list, tuple))]
    lengths = {len(given[name]) for name in lists if given[name]}
    if len(lengths) > 1:
        raise Impossible(f"lists of lengths {sorted(lengths)}")
    if not lengths:
        raise Unknown
    return lists, [
        {**given, **{name: given[name][i] if given[name] else None for name in lists}}
        for i in range(lengths.pop())
    ]


def foreach(reader: Reader, call: OpCall) -> int:
    """The value of a ``_foreach_*`` operator."""
    _, items = _items(call)
    packed = find_tensor(reader, call.arguments.get("scalars"))
    if packed is not None and packed.shape != (len(items),):
        raise Impossible(
            f"numbers of shape {list(packed.shape)} for {len(items)} items"
        )
    values = [_foreach_item(reader, call, item, i) for i, item in enumerate(items)]
    return reader.table.list_of(values)


def _foreach_item(
    reader: Reader, call: OpCall, item: dict[str, Any], place: int
) -> int:
    if call.name == "aten::_foreach_copy" and _is_plain_copy(reader, item):
        return reader.value(item["src"])
    tensors = (find_tensor(reader, each) for each in item.values())
    shapes = (found.shape for found in tensors if found is not None)
    shape = () if call.name in _TO_NUMBERS else known(next(shapes, None))
    packed, numbers = call.arguments.get("scalars"), []
    if isinstance(packed, fx.Node):
        # The numbers of all items lie in one tensor: this item takes the one at its place.
        numbers = [selected(reader.table, tensor_of(reader, packed).value, 0, place)]
        item = {**item, "scalars": None}
    attributes, children = split_arguments(reader, item)
    atom = reader.table.term(call.head, attributes, (*children, *numbers))
    return reader.table.tensor(atom, shape)


def _is_plain_copy(reader: Reader, item: dict[str, Any]) -> bool:
    to, source = (find_tensor(reader, item[name]) for name in ("self", "src"))
    kinds = {kind_of(reader, item[name]) for name in ("self", "src")}
    if to is None or source is None or len(kinds) > 1 or None in kinds:
        return False
    return to.shape == source.shape


def fused(reader: Reader, call: OpCall) -> int:
    """A ``_fused_*`` optimizer: one list of new values for each list of old ones."""
    if not isinstance(call.first, (list, tuple)):
        return elementwise(reader, call)
    names, items = _items(call)
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for item in items:
        attributes, children = split_arguments(reader, item)
        children += layouts_walked(reader, [item[name] for name in names])
        for number, name in enumerate(names):
            found = find_tensor(reader, item[name])
            if found is None:
                continue  # an empty list: this optimizer does not keep such a state
            value, shape = found
            if name != "grads" or item.get("grad_scale") is not None:
                atom = reader.table.term(call.head, (number, attributes), children)
                value = reader.table.tensor(atom, shape)
            outputs[name].append(value)
    return reader.table.list_of(map(reader.table.list_of, outputs.values()))


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
# Views of the same places.
_KEEPING = frozenset({"aten::alias", "aten::detach", "_c10d_functional::wait_tensor"})


def reads_layout(call: OpCall) -> bool:
    """Whether what a call computes depends on how its operand lies in memory."""
    if call.signature is None or not isinstance(call.first, fx.Node):
        return False
    return call.signature.name in _BY_PLACE or call.signature.is_random


def layouts_walked(reader: Reader, items: Sequence[Any]) -> list[int]:
    """A value for the layouts of tensors that are walked through together.

    None where they lie in the same way: element i of each then belongs to element i of
    the others, however they lie. Like all layouts, it makes nothing certain.
    """
    tensors = [find_tensor(reader, item) for item in items]
    shape = () if tensors[0] is None else tensors[0].shape
    # Numbers, as counts of steps are, lie nowhere else; other shapes are other values.
    lying = [reader.layout(i) if isinstance(i, fx.Node) else None for i in items]
    walked = {
        layout
        for layout, found in zip(lying, tensors, strict=True)
        if shape and found is not None and found.shape == shape
    }
    if len(walked) < 2 and all(_leaves_no_gaps(shape, each) for each in walked):
        return []
    return [reader.table.term(f"layouts {lying!r}", None, ())]


def layout_read(reader: Reader, call: OpCall) -> int:
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
    head = f"layout {reader.layout(node)!r} of {memory} through {chain!r}"
    return reader.table.term(head, None, ())


def unknown_layout(reader: Reader, node: fx.Node) -> Hashable:
    """The layout of a node of whose value nothing is known: it follows from its call."""
    call = (str(node.target), repr(node.args), repr(node.kwargs))
    follows = tuple(map(reader.layout, node.all_input_nodes))
    # By number: written out, layouts of layouts would grow without end.
    return "unknown", reader.table.term("unknown layout", (*call, follows), ())


def _leaves_no_gaps(shape: Sequence[Any], strides: Hashable) -> bool:
    """Whether memory with these strides, in short, holds each element once, and no more."""
    sizes = [size for size in shape if size != 1]
    if not isinstance(strides, tuple) or len(strides) != len(sizes):
        return False
    if not are_integers((*sizes, *strides)):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


def known_layout(value: object) -> Hashable:
    """The strides of a fake tensor.

    >>> known_layout(torch.empty(3, 2).t()), known_layout(torch.empty(3, 1, 2))
    ((1, 2), (2, 1))
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(known_layout, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    shape, strides = value.shape, value.stride()
    if not are_integers((*shape, *strides)):
        return repr((shape, strides))
    # The stride of a dimension of one place says nothing.
    pairs = zip(shape, strides, strict=False)
    return tuple(stride for size, stride in pairs if size != 1)


OPERATOR_RULES: dict[str, Rule] = {
    **VIEWS,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::unbind": _unbind,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::chunk": _split,
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
    CAST: _cast,
    "aten::to": _cast,
    "aten::copy": _copy,
    "aten::full": partial(_fill, None),
    "aten::full_like": partial(_fill, None),
    "aten::new_full": partial(_fill, None),
    "aten::fill": partial(_fill, None),
    "aten::zeros": partial(_fill, 0),
    "aten::zeros_like": partial(_fill, 0),
    "aten::new_zeros": partial(_fill, 0),
    "aten::zero": partial(_fill, 0),
    "aten::ones": partial(_fill, 1),
    "aten::ones_like": partial(_fill, 1),
    "aten::new_ones": partial(_fill, 1),
    "aten::t": _permute,
    "aten::transpose": _permute,
    "aten::permute": _permute,
    "call_function _operator.getitem": getitem,
}
