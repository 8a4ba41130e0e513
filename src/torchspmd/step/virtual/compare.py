"""The runs of a graph and of the one before it, compared."""

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from torchspmd.step.graph.metadata import (
    describe_type,
    owner_of,
    readable_name,
    written_state,
)
from torchspmd.step.legality.edit import output_name
from torchspmd.step.virtual.run import StepWatcher

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
    size = data.nbytes
    # The bytes where they lie: a copy, or numpy, is not needed.
    memory = (ctypes.c_char * size).from_address(data.data_ptr()) if size else b""
    bits = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return f"{describe_type(value)} {bits}"


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

_NAMED = 6  # nodes and outputs in one line
Runner = Callable[[fx.Graph, StepWatcher], None]  # runs a graph for all steps


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        node: The first node of the edited graph whose value is not that of its node before.
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

    def __str__(self) -> str:
        """Some lines."""
        lines = [
            f"first node that differs: {self.node} ({self.where}), step {self.step}, "
            f"rank {self.rank}"
        ]
        if self.added:
            lines.append(f"  computed from nodes that were added: {_first(self.added)}")
        if self.relaid:
            lines.append(f"  the same bits, but other strides: {self.relaid}")
        lines += [f"  {line}" for line in str(self.difference).splitlines()]
        return "\n".join(lines)


class _Found(Exception):  # noqa: N818 - not an error, the end of a search
    def __init__(self, step: int, rank: int, node: fx.Node, value: Any) -> None:
        super().__init__()
        self.step, self.rank, self.node, self.value = step, rank, node, value


def find_first_difference(
    before: fx.Graph, after: fx.Graph, run: Runner
) -> FirstDifference | None:
    """The first node of ``after`` that differs from the node of its name in ``before``.

    Three runs: the digests of one graph, the other up to where it differs, and the first
    again for that node's value. None when all such nodes are equal and only the outputs
    are put together otherwise.
    """
    expected: dict[tuple[int, int, str], tuple[str, str]] = {}
    relaid: list[str] = []
    common = _common_names(before, after)

    def record(step: int, rank: int, node: fx.Node, value: Any) -> None:
        if node.name in common:
            expected[step, rank, node.name] = digest(value), _strides(value)

    def compare(step: int, rank: int, node: fx.Node, value: Any) -> None:
        if (step, rank, node.name) not in expected:
            return
        bits, strides = expected[step, rank, node.name]
        if digest(value) != bits:
            raise _Found(step, rank, node, value)
        if _strides(value) != strides:
            relaid.append(f"{readable_name(node)}, {strides} -> {_strides(value)}")

    run(before, record)
    new = _search(after, compare, run)
    if new is None:
        return None

    def fetch(step: int, rank: int, node: fx.Node, value: Any) -> None:
        if (step, rank, node.name) == (new.step, new.rank, new.node.name):
            raise _Found(step, rank, node, value)

    old, owner = _search(before, fetch, run), owner_of(new.node)
    assert old is not None, f"{new.node.name} was recorded, and did not run again"
    return FirstDifference(
        readable_name(new.node),
        f"{owner.module}, {owner.phase}",
        new.step,
        new.rank,
        find_difference(old.value, new.value),
        _added(new.node, common),
        relaid[0] if relaid else "",
    )


def _search(graph: fx.Graph, watch: StepWatcher, run: Runner) -> _Found | None:
    try:
        run(graph, watch)
    except _Found as found:
        return found
    return None


def _strides(value: Any) -> str:
    return str(value.stride()) if isinstance(value, torch.Tensor) else ""


def _common_names(before: fx.Graph, after: fx.Graph) -> set[str]:
    """Names that mean the same node in both, and that have a value at all."""
    targets = {node.name: node.target for node in before.nodes}
    return {
        node.name
        for node in after.nodes
        if node.op in ("call_function", "placeholder")
        and targets.get(node.name) == node.target
        and "empty" not in str(node.target)  # memory that was not written yet
    }


def _added(node: fx.Node, common: set[str]) -> tuple[str, ...]:
    """New nodes among those that a node is computed from, nearest first."""
    found: dict[str, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop(0)
        if each.name not in common and each.name not in found:
            found[each.name] = None
            waiting += each.all_input_nodes
    return tuple(found)


# ----------------------------------------------------------------------------
# The outputs of a graph and of the one before it.

_Results = list[list[Any]]  # of a step, by rank and output
Digests = list[list[str]]  # the same, as what is compared


def digests_of(outputs: _Results) -> Digests:
    """What is compared of the outputs of a step."""
    return [list(map(digest, row)) for row in outputs]


def name_outputs(graph: fx.Graph, places: Sequence[int], most: int = _NAMED) -> str:
    """The names of some outputs; new values of states come first."""
    state = written_state(graph)
    ordered = sorted(places, key=lambda place: place not in state)
    return _first([output_name(graph, place) for place in ordered], most)


def _first(names: Sequence[str], most: int = _NAMED) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


@dataclass(frozen=True, slots=True)
class Trace:
    """The outputs of a run.

    Attributes:
        digests: By step, rank and output.
        vacuous: Outputs that show nothing: all zero or all NaN at each step.
    """

    digests: tuple[Digests, ...]
    vacuous: frozenset[int]

    @classmethod
    def of(cls, steps: Iterable[_Results]) -> Self:
        """Read what a run gives, step by step: a later one may write into it."""
        digests, vacuous = [], []
        for results in steps:
            digests.append(digests_of(results))
            vacuous.append({n for n, v in enumerate(results[0]) if is_vacuous(v)})
        return cls(tuple(digests), frozenset(set.intersection(*vacuous)))

    def differing(self, other: Self) -> list[int]:
        """The outputs that have other bits on some rank at some step."""
        found: set[int] = set()
        for before, after in zip(self.digests, other.digests, strict=True):
            for ours, theirs in zip(before, after, strict=True):
                if len(ours) != len(theirs):
                    return list(range(len(theirs)))
                found |= {n for n, d in enumerate(theirs) if d != ours[n]}
        return sorted(found)


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
