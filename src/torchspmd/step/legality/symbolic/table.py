"""Values, each kept once: two nodes compute the same where they have the same number."""

from collections.abc import Hashable, Iterable
from math import prod
from typing import Any, NamedTuple

from torchspmd.step.legality.symbolic.segments import (
    EVERYWHERE,
    Pieces,
    Segment,
    Segments,
    Shape,
    concatenate,
    join,
)


class Term(NamedTuple):
    """Something computed from other values.

    Attributes:
        head: What computes it.
        attributes: Everything about the call that is no value: numbers, places, names.
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

    def rows(self, parts: tuple[int, ...], num_rows: int) -> int:
        """Rows that hold a row of each part, taken apart only where that is needed."""
        made = self.term(ROWS, num_rows, parts)
        self.sizes[made] = sum(self.num_elements(part) for part in parts)
        return made

    def num_elements(self, value: int) -> int:
        """How many elements a tensor has."""
        flat = self._values[value]
        assert isinstance(flat, Flat), flat
        return prod(flat.shape)

    def pieces(self, value: int) -> Pieces:
        """A tensor's segments, to be cut."""
        found = self._pieces.get(value)
        if found is None:
            found = self._pieces[value] = Pieces(self.segments(value))
        return found

    def segments(self, value: int) -> Segments:
        """A tensor's segments, with rows taken apart."""
        flat = self._values[value]
        assert isinstance(flat, Flat), flat
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
