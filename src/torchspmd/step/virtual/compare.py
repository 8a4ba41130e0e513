"""The runs of a graph and of the one before it, compared."""

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd.step.graph.metadata import (
    output_values,
    owner_of,
    readable_name,
    written_state,
)
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.legality.edit import output_name as name_in_proof
from torchspmd.step.virtual.certificate import EQUAL, Check
from torchspmd.step.virtual.ranks import Watcher

# ----------------------------------------------------------------------------
# Whether two values have the same bits, and by how much they differ: never the values.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(value: Any) -> str:
    """A text that is equal for values with equal bits, shape and dtype.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(1) * -1)[:10]
    (True, 'float32[1]')
    >>> digest(torch.tensor(0.0)) == digest(torch.tensor(-0.0))
    False
    """
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(digest, value)) + ")"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    data = value.detach().contiguous().cpu()
    size = data.numel() * data.element_size()
    # The bytes where they lie: a copy, or numpy, is not needed.
    memory = (ctypes.c_char * size).from_address(data.data_ptr()) if size else b""
    bits = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return f"{describe_type(value)} {bits}"


def describe_type(value: Any) -> str:
    """As in ``float32[2, 3]``."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def is_vacuous(value: Any) -> bool:
    """Whether a tensor could hide a mistake: all NaN, or all zero.

    >>> [is_vacuous(v) for v in (torch.zeros(2), torch.ones(2), torch.zeros(0), 0)]
    [True, False, False, False]
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return False
    return bool((value == 0).all()) or bool(torch.isnan(value).all())


@dataclass(frozen=True, slots=True)
class Difference:
    """How two values of one node differ.

    Attributes:
        before: Shape, dtype, minimum, maximum and mean of the first.
        after: The same of the second.
        share: The part of the elements that have other bits; 1 for other shapes.
        ulp: The largest distance in units of the last place; None where that means
            nothing.
    """

    before: str
    after: str
    share: float
    ulp: int | None

    def __str__(self) -> str:
        """Three lines."""
        far = "" if self.ulp is None else f", at most {self.ulp} ulp apart"
        return (
            f"before: {self.before}\nafter:  {self.after}\n"
            f"{self.share:.2%} of the elements differ{far}"
        )


def find_difference(before: Any, after: Any) -> Difference:
    """Describe how two values differ.

    >>> one = torch.ones(4)
    >>> other = one.clone()
    >>> other[0] = torch.nextafter(one[0], torch.tensor(2.0))
    >>> print(find_difference(one, other))
    before: float32[4], min 1, max 1, mean 1
    after:  float32[4], min 1, max 1, mean 1
    25.00% of the elements differ, at most 1 ulp apart
    """
    before, after = _first_unequal(before, after)
    facts = _summary(before), _summary(after)
    if not _comparable(before, after):
        return Difference(*facts, 1.0, None)
    kind = _INTEGERS[before.element_size()]
    bits = [value.contiguous().reshape(-1).view(kind) for value in (before, after)]
    share = float((bits[0] != bits[1]).double().mean())
    ulp = _ulp(bits[0], bits[1]) if before.is_floating_point() else None
    return Difference(*facts, share, ulp)


def gap_between(before: Any, after: Any) -> float:
    """The largest distance of two elements, as a part of the largest one.

    Infinite where that means nothing: other shapes, integers that differ, NaN in one.

    >>> gap_between(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        pairs = zip(before, after, strict=False)
        return max((gap_between(*pair) for pair in pairs), default=0.0)
    if digest(before) == digest(after):
        return 0.0
    if not _comparable(before, after) or not before.is_floating_point():
        return math.inf
    one, other = before.double(), after.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    keep = one.isfinite()
    apart = torch.where(keep, (one - other).abs(), 0.0).max()
    largest = torch.where(keep, one.abs(), 0.0).max()
    return float(apart / largest) if largest else math.inf


def _first_unequal(before: Any, after: Any) -> tuple[Any, Any]:
    """Of two lists, the first items that differ."""
    are_lists = isinstance(before, (list, tuple)) and isinstance(after, (list, tuple))
    if not are_lists:
        return before, after
    for one, other in zip(before, after, strict=False):
        if digest(one) != digest(other):
            return _first_unequal(one, other)
    return None, None


def _comparable(before: Any, after: Any) -> bool:
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.shape == after.shape
        and before.dtype == after.dtype
        and before.element_size() in _INTEGERS
        and before.numel() > 0
    )


def _ulp(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest distance of two floats, counted in floats between them."""
    lowest = torch.iinfo(left.dtype).min
    # Bits of negative floats fall where the floats rise: mirrored, all rise.
    one, other = (
        torch.where(bits < 0, lowest - bits.long(), bits.long())
        for bits in (left, right)
    )
    same_side = (one < 0) == (other < 0)
    near = torch.where(same_side, one - other, 0).abs().max()
    # Across zero the distance of two doubles may be too long for an integer.
    far = torch.where(same_side, 0.0, one.double().abs() + other.double().abs()).max()
    return max(int(near), int(far))


def _summary(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return describe_type(value)
    if value.is_complex() or value.dtype is torch.bool:
        return describe_type(value)
    wide = value.double()
    text = f"min {wide.min():.6g}, max {wide.max():.6g}, mean {wide.mean():.6g}"
    num_nan = int(torch.isnan(wide).sum())
    return f"{describe_type(value)}, {text}" + (f", {num_nan} NaN" if num_nan else "")


# ----------------------------------------------------------------------------
# The first node at which two graphs part, found by running both.

# Runs a graph for all steps; the watcher is told the step too.
Runner = Callable[[fx.Graph, Callable[[int], Watcher]], None]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        node: The first node of the edited graph whose value is not its twin's; empty
            when all such nodes are equal and only the outputs are put together otherwise.
        where: Its module and phase.
        step: At which step, from 0.
        rank: On which virtual rank.
        difference: Statistics of both values.
        added: Nodes that the edit added and that this one is computed from.
        relaid: The first node before it whose value has the same bits with other strides,
            which may change how a kernel adds; empty when there is none.
    """

    node: str
    where: str
    step: int
    rank: int
    difference: Difference
    added: tuple[str, ...]
    relaid: str


class _Found(Exception):  # noqa: N818 - not an error, the end of a search
    def __init__(self, node: fx.Node, step: int, rank: int, value: Any) -> None:
        super().__init__()
        self.node, self.step, self.rank, self.value = node, step, rank, value


def find_first_difference(
    before: fx.Graph, after: fx.Graph, run: Runner
) -> FirstDifference | None:
    """The first node of ``after`` that differs from the node of its name in ``before``.

    Three runs: the digests of one graph, the other up to where it differs, and the first
    again for that node's value.
    """
    expected: dict[tuple[int, int, str], tuple[str, str]] = {}
    relaid: list[str] = []
    twins = _twins(before, after)

    def record(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            if node.name in twins:
                expected[step, rank, node.name] = digest(value), _strides(value)

        return watch

    def compare(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            wanted, lay = expected.get((step, rank, node.name), (None, ""))
            if wanted is not None and digest(value) != wanted:
                raise _Found(node, step, rank, value)
            if wanted is not None and _strides(value) != lay:
                relaid.append(f"{readable_name(node)}, {lay} -> {_strides(value)}")

        return watch

    run(before, record)
    try:
        run(after, compare)
    except _Found as found:
        return _describe(before, found, twins, (*relaid, "")[0], run)
    return None


def _describe(
    before: fx.Graph, found: _Found, twins: set[str], relaid: str, run: Runner
) -> FirstDifference:
    def fetch(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            place = step, rank, node.name
            if place == (found.step, found.rank, found.node.name):
                raise _Found(node, step, rank, value)

        return watch

    try:
        run(before, fetch)
    except _Found as original:
        owner = owner_of(found.node)
        return FirstDifference(
            readable_name(found.node),
            f"{owner.module}, {owner.phase}",
            found.step,
            found.rank,
            find_difference(original.value, found.value),
            _added(found.node, twins),
            relaid,
        )
    raise AssertionError("a node that was recorded did not run again")


def _strides(value: Any) -> str:
    return str(value.stride()) if isinstance(value, torch.Tensor) else ""


def _twins(before: fx.Graph, after: fx.Graph) -> set[str]:
    """Names that mean the same node in both, and that have a value at all."""
    targets = {node.name: node.target for node in before.nodes}
    return {
        node.name
        for node in after.nodes
        if node.op in ("call_function", "placeholder")
        and targets.get(node.name) == node.target
        and "empty" not in str(node.target)  # memory that nobody has written yet
    }


def _added(node: fx.Node, twins: set[str]) -> tuple[str, ...]:
    """New nodes among those that a node is computed from, nearest first."""
    found: dict[str, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop(0)
        if each.name not in twins and each.name not in found:
            found[each.name] = None
            waiting += each.all_input_nodes
    return tuple(found)


def output_name(graph: fx.Graph, index: int) -> str:
    """What an output is called in messages: by the state that it is a new value of."""
    state = written_state(graph).get(index)
    if state is not None:
        return readable_name(state)
    value = output_values(graph)[index]
    node = readable_name(value) if isinstance(value, fx.Node) else repr(value)
    return f"output {index} ({node})"


_Results = list[list[Any]]  # of a step, by rank and output


@dataclass(frozen=True, slots=True)
class Trace:
    """The digests of a run's outputs by step, rank and output; which show nothing."""

    digests: list[list[list[str]]]
    vacuous: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The runs of a graph and of the one before it."""

    graph: fx.Graph
    what: str
    order: str
    before: Trace
    after: Trace

    def differing(self) -> list[int]:
        """The outputs that have other bits on some rank at some step."""
        pairs = zip(self.before.digests, self.after.digests, strict=True)
        found: set[int] = set()
        for before, after in pairs:
            for ours, theirs in zip(before, after, strict=True):
                if len(ours) != len(theirs):
                    return list(range(len(theirs)))
                found |= {n for n, d in enumerate(theirs) if d != ours[n]}
        return sorted(found)

    def told(self, differing: list[int]) -> Iterator[str]:
        """A line about outputs with other bits; what is named comes first."""
        state = written_state(self.graph)
        ordered = sorted(differing, key=lambda index: index not in state)
        names = ", ".join(output_name(self.graph, n) for n in ordered[:6])
        more = ", ..." if len(ordered) > 6 else ""
        count = f"{len(ordered)} of {len(output_values(self.graph))}"
        yield f"  {count} outputs differ: {names}{more}"

    def check(self, differing: list[int], ranks: str, gap: float) -> Check:
        """What was compared and how it came out; the gap is that of ``furthest``."""
        result = EQUAL
        if differing:
            names = ", ".join(output_name(self.graph, n) for n in differing[:3])
            result = (
                f"other bits in {len(differing)} outputs ({names}), at most {gap:.2g} of "
                "the largest entry apart"
            )
        return Check(
            self.what,
            ranks,
            self.order,
            len(self.after.digests),
            len(self.after.digests[0][0]),
            result,
            tuple(output_name(self.graph, n) for n in self.after.vacuous),
        )


def settled(
    before: fx.Graph, pair: Pair, differing: list[int], report: PassReport | None
) -> tuple[str, ...]:
    """The unproved outputs of a pass that have the same bits, and show something."""
    if report is None or not report.unproved_names:
        return ()
    silent = {*differing, *pair.before.vacuous, *pair.after.vacuous}
    places = set(range(len(pair.after.digests[0][0]))) - silent
    shown = {name_in_proof(before, place) for place in places}
    return tuple(name for name in report.unproved_names if name in shown)


def furthest(
    before: Iterable[_Results], after: Iterable[_Results], outputs: Sequence[int]
) -> float:
    """How far outputs are apart in two runs, as ``gap_between`` counts it."""
    gaps = [
        gap_between(ours[place], theirs[place])
        for old, new in zip(before, after, strict=True)
        for ours, theirs in zip(old, new, strict=True)
        for place in outputs
    ]
    return max(gaps, default=0.0)
