"""Values, each kept once: two nodes compute the same where they have the same number."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of

_T = TypeVar("_T")

# ----------------------------------------------------------------------------
# Flat tensors as sequences of segments: pieces of other values, one after the other.
#
# A tensor that passes pack and unpack is read in its logical (row-major) order. Views
# change its shape only; ``cat``, ``split`` and ``slice`` reorder and cut the pieces. Two
# ways to pack and unpack that bring each element back to its place give the same sequence.

EVERYWHERE = -1  # the offset into a value that is the same at every place
_MOST_RUNS = 4096  # of one value that are looked at one by one


class Segment(NamedTuple):
    """``length`` elements of the value ``atom`` from ``offset`` on."""

    atom: int
    offset: int
    length: int


Segments = tuple[Segment, ...]
Shape = tuple[int, ...]


def join(segments: Iterable[Segment]) -> Segments:
    """The same elements in as few segments as possible.

    >>> join([Segment(7, 0, 2), Segment(7, 2, 3), Segment(8, 0, 0)])
    (Segment(atom=7, offset=0, length=5),)
    """
    joined: list[Segment] = []
    for segment in segments:
        if segment.length == 0:
            continue
        last = joined[-1] if joined else None
        if last is not None and _continues(last, segment):
            joined[-1] = Segment(last.atom, last.offset, last.length + segment.length)
        else:
            joined.append(segment)
    return tuple(joined)


def _continues(last: Segment, segment: Segment) -> bool:
    if last.atom != segment.atom:
        return False
    if last.offset == EVERYWHERE:
        return True
    return last.offset + last.length == segment.offset


class Pieces:
    """A sequence of segments that can be cut anywhere."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._ends = list(accumulate(segment.length for segment in segments))

    def at(self, place: int) -> Segment:
        """What is at a place, up to the end of its segment."""
        index = bisect_right(self._ends, place)
        return self.cut(place, self._ends[index] - place)[0]

    def cut(self, start: int, length: int) -> list[Segment]:
        """The segments of ``length`` elements from ``start`` on.

        >>> Pieces([Segment(7, 10, 3), Segment(8, 0, 3)]).cut(2, 2)
        [Segment(atom=7, offset=12, length=1), Segment(atom=8, offset=0, length=1)]
        """
        found = []
        index, end = bisect_right(self._ends, start), start + length
        while start < end:
            atom, offset, size = self._segments[index]
            skipped = start - (self._ends[index] - size)
            taken = min(self._ends[index], end) - start
            offset = offset if offset == EVERYWHERE else offset + skipped
            found.append(Segment(atom, offset, taken))
            start, index = start + taken, index + 1
        return found


def narrow(pieces: Pieces, shape: Shape, dim: int, start: int, length: int) -> Segments:
    """``length`` places of a dimension from ``start`` on.

    >>> narrow(Pieces([Segment(7, 0, 6)]), (2, 3), 1, 0, 2)
    (Segment(atom=7, offset=0, length=2), Segment(atom=7, offset=3, length=2))
    """
    inner = prod(shape[dim + 1 :])
    row = shape[dim] * inner
    rows = range(prod(shape[:dim]))
    cuts = (pieces.cut(i * row + start * inner, length * inner) for i in rows)
    return join(segment for cut in cuts for segment in cut)


def concatenate(parts: Sequence[tuple[Pieces, int]], num_rows: int) -> Segments:
    """Rows that each hold a row of every part; a part comes with the length of its rows.

    >>> a, b = Pieces([Segment(7, 0, 4)]), Pieces([Segment(8, 0, 2)])
    >>> [segment.atom for segment in concatenate([(a, 2), (b, 1)], num_rows=2)]
    [7, 8, 7, 8]
    """
    return join(
        segment
        for row in range(num_rows)
        for pieces, width in parts
        for segment in pieces.cut(row * width, width)
    )


class Term(NamedTuple):
    """Something computed from other values.

    Attributes:
        head: What computes it.
        attributes: Everything about the call besides values: numbers, places, names.
        children: The values that it is computed from.
    """

    head: str
    attributes: Any
    children: tuple[int, ...]


class Flat(NamedTuple):
    """A tensor: its shape, and where its elements come from in row-major order."""

    shape: Shape
    segments: Segments


class Runs(NamedTuple):
    """``num`` runs of ``length`` elements of one value, ``stride`` apart."""

    base: int
    offset: int
    length: int
    stride: int
    num: int


INPUT, TUPLE, FILL, STRIDED, ROWS = "input", "tuple", "fill", "strided", "rows"
CAST = "aten::_to_copy"
ALL_REDUCE, GATHER, SCATTER, BROADCAST = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
)
COLLECTIVES = frozenset({ALL_REDUCE, GATHER, SCATTER, BROADCAST})


class ValueTable:
    """All values of the graphs that are compared.

    Args:
        ignores_casts: Take a collective in another dtype, with a cast before and behind
            it, for the same. Values that differ even then differ for certain.
    """

    def __init__(self, ignores_casts: bool = False) -> None:
        self._ignores_casts = ignores_casts
        self._numbers: dict[Term | Flat, int] = {}
        self._values: list[Term | Flat] = []
        self._pieces: dict[int, Pieces] = {}
        self.sizes: dict[int, int] = {}  # elements of each value that a segment names

    def __getitem__(self, value: int) -> Term | Flat:
        return self._values[value]

    def term(self, head: str, attributes: Hashable, children: Iterable[int]) -> int:
        """The value of a computation."""
        return self._number(Term(head, attributes, tuple(children)))

    def cast(self, atom: int, attributes: Hashable) -> int:
        """A value in another dtype or on another device."""
        if self._ignores_casts and self._values[atom][0] in COLLECTIVES:
            return atom
        return self.term(CAST, attributes, (atom,))

    def uncast(self, atom: int) -> int:
        """What a collective sends, without the cast before it if that is ignored."""
        term = self._values[atom]
        is_cast = isinstance(term, Term) and term.head == CAST
        return term[-1][0] if self._ignores_casts and is_cast else atom  # type: ignore[return-value]

    def tensor(self, atom: int, shape: Shape) -> int:
        """A whole tensor about whose elements nothing more is known."""
        size = prod(shape)
        self.sizes[atom] = size
        return self.flat(shape, (Segment(atom, 0, size),))

    def filled(self, attributes: Hashable, shape: Shape) -> int:
        """A tensor with one number everywhere."""
        atom = self.term(FILL, attributes, ())
        self.sizes[atom] = 0
        return self.flat(shape, (Segment(atom, EVERYWHERE, prod(shape)),))

    def flat(self, shape: Shape, segments: Iterable[Segment]) -> int:
        """A tensor put together from segments."""
        return self._number(Flat(shape, self._regular(join(segments))))

    def list_of(self, values: Iterable[int]) -> int:
        """Several values in a list."""
        return self.term(TUPLE, None, values)

    def strided(self, atom: int, offset: int, run: int, stride: int, count: int) -> int:
        """``count`` runs of elements of one value, ``stride`` apart."""
        made = self.term(STRIDED, (offset, run, stride, count), (atom,))
        self.sizes[made] = run * count
        return made

    def runs_of(self, atom: int) -> Runs | None:
        """What runs a value consists of; None for any other value."""
        term = self._values[atom]
        if not isinstance(term, Term) or term.head != STRIDED:
            return None
        return Runs(term.children[0], *term.attributes)

    def run_by_run(self, segment: Segment) -> list[Segment]:
        """The runs that a segment consists of; itself, for other values or too many."""
        runs = self.runs_of(segment.atom)
        if runs is None or runs.num > _MOST_RUNS:
            return [segment]
        starts = [runs.offset + number * runs.stride for number in range(runs.num)]
        parts = [Segment(runs.base, start, runs.length) for start in starts]
        return Pieces(parts).cut(segment.offset, segment.length)

    def rows(self, parts: tuple[int, ...], num_rows: int) -> int:
        """Rows that hold a row of each part, cut into these only where that is needed."""
        made = self.term(ROWS, num_rows, parts)
        self.sizes[made] = sum(self.num_elements(part) for part in parts)
        return made

    def elements(self, value: int) -> Flat:
        """The shape and the segments of a tensor."""
        flat = self._values[value]
        assert isinstance(flat, Flat), f"{flat} is no tensor"
        return flat

    def num_elements(self, value: int) -> int:
        """How many elements a tensor has."""
        return prod(self.elements(value).shape)

    def pieces(self, value: int) -> Pieces:
        """A tensor's segments, to be cut."""
        found = self._pieces.get(value)
        if found is None:
            found = self._pieces[value] = Pieces(self.segments(value))
        return found

    def segments(self, value: int) -> Segments:
        """A tensor's segments, with rows cut into their parts."""
        flat = self.elements(value)
        if not any(self._values[each.atom][0] == ROWS for each in flat.segments):
            return flat.segments
        return join(part for each in flat.segments for part in self._expand(each))

    def _expand(self, segment: Segment) -> list[Segment]:
        term = self._values[segment.atom]
        if not isinstance(term, Term) or term.head != ROWS:
            return [segment]
        pieces = self._pieces.get(segment.atom)
        if pieces is None:
            num_rows = term.attributes
            parts = [
                (self.pieces(part), self.num_elements(part) // num_rows)
                for part in term.children
            ]
            pieces = Pieces(concatenate(parts, num_rows))
            self._pieces[segment.atom] = pieces
        return pieces.cut(segment.offset, segment.length)

    def _regular(self, segments: Segments) -> Segments:
        """Runs at regular distances in one value as one segment, always in one form."""
        if any(self._values[each.atom][0] == STRIDED for each in segments):
            segments = join(map(self._row_of_runs, segments))
        if len(segments) < 2 or segments[0].offset == EVERYWHERE:
            return segments
        (atom, first, run), second = segments[0], segments[1]
        stride = second.offset - first
        if stride <= run or any(
            each != (atom, first + number * stride, run)
            for number, each in enumerate(segments)
        ):
            return segments
        made = self.strided(atom, first, run, stride, len(segments))
        return (Segment(made, 0, run * len(segments)),)

    def _row_of_runs(self, segment: Segment) -> Segment:
        """A part of regular runs: one run of the value itself, or fewer runs."""
        runs = self.runs_of(segment.atom)
        if runs is None:
            return segment
        base, offset, run, stride, _ = runs
        skipped, cut = divmod(segment.offset, run)
        count, rest = divmod(segment.length, run)
        begin = offset + skipped * stride + cut
        if cut + segment.length <= run:
            return Segment(base, begin, segment.length)
        if cut or rest:
            return segment
        made = self.strided(base, begin, run, stride, count)
        return Segment(made, 0, segment.length)

    def _number(self, value: Term | Flat) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._values.append(value)
        return number


# ----------------------------------------------------------------------------
# One call in a graph, its arguments by name, and what rules need to read it.

# What a node gives, without values; None where that is not known.
Fakes: TypeAlias = Mapping[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an operator or a function.

    Attributes:
        node: The node that calls.
        name: ``namespace::name`` of the functional form; of a function, its own name.
        head: The name with the overload, which distinguishes calls; of a function,
            with its identity: two functions may have one name.
        arguments: All arguments by name, defaults filled in, as they stand in the graph.
        signature: What the operator's schema says; None for a function.
    """

    node: fx.Node
    name: str
    head: str
    arguments: dict[str, Any]
    signature: _torch.Signature | None

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self.arguments.values()), None)


class Reader(Protocol):
    """Who knows the values of a graph's nodes."""

    table: ValueTable
    fakes: Fakes

    def value(self, node: fx.Node) -> int:
        """The value of a node at this point of the graph."""

    def layout(self, node: fx.Node) -> Hashable:
        """How what a node gives lies in memory."""


class Unknown(Exception):  # noqa: N818 - not an error: a rule says nothing about a call
    """A call about which only its name and arguments are known."""


class Impossible(Exception):  # noqa: N818 - not an error of the rule's: the call has one
    """A call that cannot run on what it is given; the text says why."""


# Gives the value of a call, or raises Unknown or Impossible.
Rule: TypeAlias = Callable[[Reader, OpCall], int]


def read_call(node: fx.Node) -> OpCall:
    """A node's call with its arguments by name.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = read_call(graph.call_function(torch.ops.aten.add_.Tensor, (x, x)))
    >>> call.head, call.arguments["alpha"]
    ('aten::add.Tensor', 1)
    """
    operator = operator_of(node)
    if operator is None:
        named = {str(place): each for place, each in enumerate(node.args)}
        name = f"{node.op} {_name_of(node.target)}"
        head = name if isinstance(node.target, str) else f"{name} {id(node.target):#x}"
        return OpCall(node, name, head, {**named, **node.kwargs}, None)
    signature = _torch.signature_of(operator)
    given = dict(zip(_torch.argument_names(operator), node.args, strict=False))
    arguments = {
        name: given.get(name, node.kwargs.get(name, signature.defaults.get(name)))
        for name in signature.arguments
    }
    head = f"{signature.name}.{signature.overload}"
    return OpCall(node, signature.name, head, arguments, signature)


def _name_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def split_arguments(reader: Reader, arguments: Any) -> tuple[Hashable, list[int]]:
    """What arguments hold besides values, and the values in order."""
    children: list[int] = []

    def strip(each: Any) -> Hashable:
        if isinstance(each, fx.Node):
            children.append(reader.value(each))
            return "*"
        if isinstance(each, (list, tuple)):
            return tuple([strip(item) for item in each])
        if isinstance(each, dict):
            return tuple([(name, strip(item)) for name, item in each.items()])
        if isinstance(each, slice):
            return "slice", strip((each.start, each.stop, each.step))
        if isinstance(each, (str, torch.dtype, torch.device)) or each is None:
            return each
        return type(each).__name__, repr(each)  # 1, 1.0 and True are not the same

    return strip(arguments), children


class Tensor(NamedTuple):
    """The value and the shape of a tensor."""

    value: int
    shape: Shape


def find_tensor(reader: Reader, argument: Any) -> Tensor | None:
    """An argument that is a tensor of known shape; None for any other."""
    if not isinstance(argument, fx.Node):
        return None
    value = reader.value(argument)
    flat = reader.table[value]
    return Tensor(value, flat.shape) if isinstance(flat, Flat) else None


def tensor_of(reader: Reader, argument: Any) -> Tensor:
    """The same of an argument that must be one for a rule to apply."""
    return known(find_tensor(reader, argument))


def kind_of(reader: Reader, argument: Any) -> tuple[torch.dtype, torch.device] | None:
    """Dtype and device of an argument, where they are known."""
    value = reader.fakes.get(argument) if isinstance(argument, fx.Node) else None
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def shape_of(value: object) -> Shape | None:
    """The shape of a fake tensor; None where it is not known, or no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(value.shape)
    return shape if are_integers(shape) else None


def are_integers(items: Iterable[Any]) -> bool:
    """Whether numbers are known: neither nodes nor symbols."""
    return all(type(item) is int for item in items)


def integers(argument: Any) -> tuple[int, ...]:
    """An integer, or a list of them, that must be known for a rule to apply."""
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    if not are_integers(items):
        raise Unknown
    return tuple(items)


def known(found: _T | None) -> _T:
    """What must be known for a rule to apply."""
    if found is None:
        raise Unknown
    return found
