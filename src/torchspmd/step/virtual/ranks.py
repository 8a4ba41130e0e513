"""Virtual ranks: a program run for N ranks in one process, in lockstep.

Every rank runs to its next collective; that runs once for all ranks of its group, adding
their values in an order that can be chosen.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Group, Kind, Operator, Topology
from torchspmd.errors import UsageError, VirtualRanksError
from torchspmd.step.graph.aliases import communication_of, is_wait, node_arguments
from torchspmd.step.graph.metadata import readable_name
from torchspmd.step.graph.reports import ORDERS
from torchspmd.step.virtual.collectives import InFlight, communicate, wait

# ----------------------------------------------------------------------------
# How virtual ranks are laid out: an axis for each process group that a graph names.

DEFAULT_SIZE = 4  # of three or fewer ranks, sums show fewer orders or none


@dataclass(frozen=True, slots=True)
class VirtualAxis:
    """One direction in which virtual ranks are laid out.

    Attributes:
        label: The mesh axis or the ranks of the real group.
        size: How many virtual ranks.
        is_fixed: The graph's shapes ask for this size.
        real_size: How many ranks the real group has; 0 when there is none.
    """

    label: str
    size: int
    is_fixed: bool = False
    real_size: int = 0


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Virtual ranks on a grid, the last axis running fastest.

    Attributes:
        axes: The directions, slowest first.
        groups: Which of them each group of the graph spans, by the group's name.
    """

    axes: tuple[VirtualAxis, ...]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """How many virtual ranks there are."""
        return math.prod(axis.size for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a virtual rank, by axis."""
        found = []
        for axis in reversed(self.axes):
            rank, place = divmod(rank, axis.size)
            found.append(place)
        return tuple(reversed(found))

    def teams(self, group: str) -> list[list[int]]:
        """The sets of virtual ranks that communicate, each in group order.

        >>> layout = RankLayout(
        ...     (VirtualAxis("dp", 2), VirtualAxis("tp", 2)),
        ...     {"0": (0,), "1": (1,)},
        ... )
        >>> layout.teams("0"), layout.teams("1")
        ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
        """
        spanned = self.groups[group]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.coordinates(rank)
            outside = tuple(p for axis, p in enumerate(place) if axis not in spanned)
            found.setdefault(outside, []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        """As in ``4 virtual ranks (dp=2, tp=2)``."""
        if not self.groups:
            return f"{self.size} virtual ranks without communication"
        axes = ", ".join(f"{axis.label}={axis.size}" for axis in self.axes)
        return f"{self.size} virtual ranks ({axes})"


def collective(node: fx.Node) -> tuple[Operator, dict[str, Any]] | None:
    """The operator of a node that communicates and its arguments by name, or None."""
    found = communication_of(node)
    return None if found is None else (found, node_arguments(node))


def lay_out(
    graph: fx.Graph, ranks: int | Mapping[str, int] = DEFAULT_SIZE
) -> RankLayout:
    """Lay virtual ranks out for the groups of a graph.

    Args:
        graph: One rank's program.
        ranks: How many ranks along each axis whose size the graph's shapes leave open:
            one number for all, or by axis name (4 for those that are not named).
    """
    spans = _spans(graph)
    elements: list[_Element] = []
    members: dict[str, list[_Element]] = {}
    for span in sorted(spans, key=lambda each: len(each.ranks)):
        found = _decompose(span, elements)
        for name in span.names:
            members[name] = found
    elements.sort(key=lambda each: -each.stride)
    asked = _asked(ranks, [each.label for each in elements])
    default = ranks if isinstance(ranks, int) else DEFAULT_SIZE
    axes = tuple(_axis(each, asked, default) for each in elements)
    axes = axes or (VirtualAxis("no communication", default),)
    groups = {
        name: tuple(sorted(elements.index(each) for each in found))
        for name, found in members.items()
    }
    for axis in axes:
        if axis.size < 1:
            raise UsageError(f"virtual ranks: {axis.label}={axis.size} is not a size.")
    return RankLayout(axes, groups)


@dataclass(slots=True)
class _Span:
    """The ranks of one or more groups of a graph, and the size its shapes ask for."""

    names: list[str]
    label: str
    ranks: tuple[int, ...]
    fixed: int = 0


@dataclass(slots=True, eq=False)
class _Element:
    """An axis that no smaller group divides."""

    label: str
    offsets: frozenset[int]  # of its real ranks from the first one; empty: unknown
    stride: int
    real_size: int
    fixed: int = 0


def _spans(graph: fx.Graph) -> list[_Span]:
    topology = Topology()
    spans: dict[object, _Span] = {}
    for node, name, fixed in _group_uses(graph):
        group = _resolve(topology, name)
        key = group.ranks or name
        span = spans.setdefault(key, _Span([], group.label, group.ranks))
        if name not in span.names:
            span.names.append(name)
        if fixed and span.fixed not in (0, fixed):
            raise VirtualRanksError(
                f"virtual ranks: {node.name} works on {fixed} ranks of {group.label}, "
                f"another collective on {span.fixed}: one group cannot have both sizes."
            )
        span.fixed = span.fixed or fixed
    return list(spans.values())


def _group_uses(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, int]]:
    """Each communicating node, its group's name, and the group size that it fixes."""
    for node in graph.nodes:
        found = collective(node)
        if found is None:
            continue
        operator, arguments = found
        name = arguments.get("group_name")
        if not isinstance(name, str):
            raise VirtualRanksError(
                f"virtual ranks: {node.name} ({node.target}) does not name its group; "
                "only functional collectives can be run."
            )
        yield node, name, _fixed_size(node, operator, arguments)


def _fixed_size(node: fx.Node, operator: Operator, arguments: dict[str, Any]) -> int:
    if isinstance(size := arguments.get("group_size"), int):
        return size
    if operator.kind is not Kind.ALL_TO_ALL:
        return 0
    if "shard_dim" in arguments:
        dim = arguments["shard_dim"]
        before, after = arguments["input"].meta["val"], node.meta["val"]
        return int(before.shape[dim]) // int(after.shape[dim])
    return len(arguments["input_split_sizes"])


def _resolve(topology: Topology, name: str) -> Group:
    try:
        return topology.group_of({"group_name": name})
    except (RuntimeError, ValueError):  # a graph made without a process group
        return Group(name=name, ranks=())


def _decompose(span: _Span, elements: list[_Element]) -> list[_Element]:
    """The axes that a group spans; a new one for what the known ones do not cover."""
    offsets = frozenset(rank - span.ranks[0] for rank in span.ranks)
    inside = [
        each
        for each in elements
        if span.ranks and each.offsets and each.offsets <= offsets
    ]
    covered = {0}
    for each in inside:
        covered = {a + b for a in covered for b in each.offsets}
    if any(
        each not in inside and len(each.offsets & offsets) > 1 for each in elements
    ) or not (covered <= offsets or not span.ranks):
        raise VirtualRanksError(
            f"virtual ranks: the group of {span.label} overlaps another group of the "
            "graph without containing it, which is no grid of axes."
        )
    for each in inside if span.fixed else ():
        each.fixed = each.fixed or each.real_size
    if span.ranks and covered == offsets and inside:
        return inside
    new = _rest(span, offsets, covered)
    elements.append(new)
    return [*inside, new]


def _rest(span: _Span, offsets: frozenset[int], covered: set[int]) -> _Element:
    """The axis of a group that remains beside the axes inside it."""
    if len(covered) == 1:
        stride = min(offsets - {0}, default=0)
        size = len(offsets)
        return _Element(span.label, offsets, stride, size, span.fixed)
    stride = min(offsets - covered)
    size = len(offsets) // len(covered)
    label = f"rest of {span.label}"
    own = frozenset(stride * place for place in range(size))
    return _Element(label, own, stride, size, size if span.fixed else 0)


def _asked(ranks: int | Mapping[str, int], labels: list[str]) -> Mapping[str, int]:
    """The sizes that are asked for by name; one number is for all that are open."""
    if isinstance(ranks, int):
        return {}
    unknown = sorted(set(ranks) - set(labels))
    if unknown:
        raise UsageError(
            f"virtual ranks: the graph has no axis {', '.join(unknown)}; it communicates "
            f"over {', '.join(labels) or 'none'}."
        )
    return ranks


def _axis(element: _Element, asked: Mapping[str, int], default: int) -> VirtualAxis:
    label, fixed = element.label, element.fixed
    size = asked.get(label, fixed or default)
    if fixed and size != fixed:
        raise UsageError(
            f"virtual ranks: {label}={size} is not possible; the shapes of the graph are "
            f"those of {fixed} ranks."
        )
    return VirtualAxis(label, size, bool(fixed), element.real_size)


# ----------------------------------------------------------------------------
# Random numbers of virtual ranks: each takes them as if it were alone in its process.


class Generators:
    """Each rank's random numbers, taken from torch's default generators."""

    def __init__(self, size: int, seed: int) -> None:
        self._seeds = [seed + rank for rank in range(size)]
        self._states: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]

    @contextlib.contextmanager
    def of(self, rank: int, node: fx.Node) -> Iterator[None]:
        """A random op that runs inside takes this rank's numbers, and no other rank's."""
        device, states = _device_of(node), self._states[rank]
        generator = _default_generator(device)
        before = generator.get_state()
        if device.type in states:
            generator.set_state(states[device.type])
        else:
            generator.manual_seed(self._seeds[rank])
        try:
            yield
            states[device.type] = generator.get_state()
        finally:
            generator.set_state(before)


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    while isinstance(value, (list, tuple)):
        value = value[0]
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


Watcher = Callable[[int, fx.Node, Any], None]  # (rank, node, its value)
Graphs = Any  # a graph, or whatever has one; or one of them for each rank


@final
class VirtualRanks:
    """N ranks of one program in one process.

    Args:
        layout: How many ranks there are and who communicates with whom; see ``lay_out``.
        order: In which order reductions add: ``rank``, ``ring`` (gloo's) or ``tree``.
        seed: Virtual rank r takes its random numbers as if seeded with ``seed + r``.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> functional = torch.ops._c10d_functional
        >>> start = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
        >>> end = graph.call_function(functional.wait_tensor.default, (start,))
        >>> output = graph.output([end])
        >>> ranks = VirtualRanks.of(graph, ranks=3)
        >>> outputs = ranks.run(graph, [[torch.tensor(float(r))] for r in range(3)])
        >>> [value.item() for (value,) in outputs]
        [3.0, 3.0, 3.0]
    """

    def __init__(
        self, layout: RankLayout, *, order: str = "rank", seed: int = 0
    ) -> None:
        if order not in ORDERS:
            raise UsageError(
                f"virtual ranks: reduction order {order!r} is not known; there are "
                f"{', '.join(ORDERS)}."
            )
        self.layout = layout
        self.order = order
        self._teams = {name: layout.teams(name) for name in layout.groups}
        self._random = Generators(layout.size, seed)

    @classmethod
    def of(
        cls, graph: Graphs, ranks: int = DEFAULT_SIZE, *, order: str = "rank"
    ) -> Self:
        """Virtual ranks for the groups of a graph."""
        (first, *_) = graphs_of(graph)
        return cls(lay_out(first, ranks), order=order)

    @property
    def size(self) -> int:
        """How many virtual ranks there are."""
        return self.layout.size

    def run(
        self,
        graph: Graphs,
        inputs: Sequence[Sequence[Any]],
        *,
        constants: object = None,
        watch: Watcher | None = None,
        keep_started: bool = False,
    ) -> list[list[Any]]:
        """Run a graph once; random numbers go on where the last run ended.

        Args:
            graph: A graph or graph module for all ranks, or one for each rank: graphs
                that were captured on each rank may differ, for instance in where a
                shard begins, but must communicate in the same order.
            inputs: For each rank, the values of the placeholders. They are given to the
                graph as they are: one that writes in place writes into them.
            constants: The module that holds the constants of a graph that has no module.
            watch: Called with the rank, the node and its value, for each node.
            keep_started: Give results that were not waited for back as they are, to be
                an input of a further run that waits for them; otherwise they are an error.

        Returns:
            For each rank, what the graph returns, as a flat list.
        """
        graphs = graphs_of(graph)
        graphs = graphs * self.size if len(graphs) == 1 else graphs
        self._check(graphs, inputs)
        running = [
            _Rank(rank, given, graph.owning_module or constants, self._random).execute(
                graph, watch, keep_started
            )
            for rank, (graph, given) in enumerate(zip(graphs, inputs, strict=True))
        ]
        with torch.no_grad():
            return self._run_all(running)

    def _run_all(
        self, running: list[Generator["_Call", Any, list[Any]]]
    ) -> list[list[Any]]:
        results: list[Any] = [None] * self.size
        while True:
            pairs = zip(running, results, strict=True)
            reached = [_advance(rank, result) for rank, result in pairs]
            calls = [each for each in reached if isinstance(each, _Call)]
            if not calls:
                return [each for each in reached if isinstance(each, list)]
            if len(calls) < self.size:
                raise VirtualRanksError(
                    "virtual ranks: some ranks have ended, others have come to "
                    f"{calls[0].node.name}: they would hang."
                )
            results = self._communicate(calls)

    def _check(self, graphs: list[fx.Graph], inputs: Sequence[Sequence[Any]]) -> None:
        are_lists = isinstance(inputs, (list, tuple)) and all(
            isinstance(given, (list, tuple)) for given in inputs
        )
        if not are_lists:
            raise UsageError(
                f"VirtualRanks.run(inputs={_kinds(inputs)}): pass a list with a list of "
                f"inputs for each rank of {self.layout}, one value for each placeholder."
            )
        if len(graphs) != self.size or len(inputs) != self.size:
            raise UsageError(
                f"VirtualRanks.run: {len(graphs)} graphs and inputs of {len(inputs)} "
                f"ranks for {self.layout}. Pass one graph, or one for each rank, and a "
                "list of inputs for each rank."
            )
        wanted = len(graphs[0].find_nodes(op="placeholder"))
        for rank, given in enumerate(inputs):
            if len(given) != wanted:
                raise UsageError(
                    f"VirtualRanks.run: rank {rank} has {len(given)} inputs, the graph "
                    f"takes {wanted}."
                )

    def _communicate(self, calls: list["_Call"]) -> list[Any]:
        """The results of the collective that all ranks have come to."""
        node = calls[0].node
        for rank, call in enumerate(calls):
            if call.node.target != node.target:
                raise VirtualRanksError(
                    f"virtual ranks: rank 0 has come to {node.name} ({node.target}), rank "
                    f"{rank} to {call.node.name} ({call.node.target}): they would hang."
                )
        found = collective(node)
        assert found is not None, node
        group = found[1]["group_name"]
        teams = self._teams.get(group)
        if teams is None:
            raise VirtualRanksError(
                f"virtual ranks: {node.name} communicates over group {group}, which "
                f"{self.layout} do not have."
            )
        with _named(node):
            return communicate(
                node, [call.arguments for call in calls], teams, self.order
            )


def graphs_of(value: Graphs) -> list[fx.Graph]:
    """The graph behind a program or graph module; one for each item of a list."""
    if isinstance(value, (list, tuple)):
        return [graph for each in value for graph in graphs_of(each)]
    while not isinstance(value, fx.Graph):
        if not hasattr(value, "graph"):
            raise UsageError(
                f"virtual ranks: {type(value).__name__} has no graph. Pass a program of "
                "a compiled step, a graph module or a graph."
            )
        value = value.graph
    return [value]


def _kinds(inputs: object) -> str:
    found = type(inputs).__name__
    if not isinstance(inputs, (list, tuple)):
        return found
    return f"{found} of " + ", ".join(sorted({type(each).__name__ for each in inputs}))


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective that a rank has come to."""

    node: fx.Node
    arguments: tuple[Any, Any]


class _Rank:
    """One rank's execution of its graph, from collective to collective."""

    def __init__(
        self, rank: int, inputs: Sequence[Any], constants: object, random: Generators
    ) -> None:
        self._rank, self._constants, self._random = rank, constants, random
        self._inputs = iter(inputs)
        self._values: dict[fx.Node, Any] = {}

    def execute(
        self, graph: fx.Graph, watch: Watcher | None, keep_started: bool
    ) -> Generator[_Call, Any, list[Any]]:
        """Run every node; the outputs. Gives each collective out and takes its result."""
        last_uses = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                (values,), _ = self._arguments(node, keep_started)
                return list(values) if isinstance(values, (list, tuple)) else [values]
            if collective(node) is not None:
                value = yield _Call(node, self._arguments(node))
            else:
                value = self._node(node)
            self._values[node] = value
            if watch is not None:
                watch(self._rank, node, _seen(value))
            for used in last_uses.get(node, ()):
                del self._values[used]
        raise UsageError("virtual ranks: the graph has no output.")

    def _node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return next(self._inputs)
        if node.op == "get_attr":
            return _constant(node, self._constants)
        if node.op != "call_function":
            raise VirtualRanksError(
                f"virtual ranks: {node.name} is a {node.op}; a captured graph calls "
                "functions only."
            )
        with _named(node):
            args, kwargs = self._arguments(node)
            if is_wait(node):
                return wait(args[0])
            target: Any = node.target
            if _torch.draws_random_numbers(target, node.args, node.kwargs):
                with self._random.of(self._rank, node):
                    return target(*args, **kwargs)
            return target(*args, **kwargs)

    def _arguments(self, node: fx.Node, may_be_started: bool = False) -> Any:
        """A node's arguments; a result that was not waited for may only be waited for."""
        may_be_started |= is_wait(node) or node.target is operator.getitem

        def value(used: fx.Node) -> Any:
            found = self._values[used]
            return found if may_be_started else _finished(found, used, node)

        return fx.node.map_arg((node.args, node.kwargs), value)


@contextlib.contextmanager
def _named(node: fx.Node) -> Iterator[None]:
    """Errors inside name the node."""
    try:
        yield
    except VirtualRanksError:
        raise
    except Exception as error:
        raise VirtualRanksError(
            f"virtual ranks: {readable_name(node)} ({node.target}) failed with "
            f"{type(error).__name__}, whose own text comes with this error."
        ) from error


def _advance(
    running: Generator[_Call, Any, list[Any]], result: Any
) -> _Call | list[Any]:
    """Run a rank to its next collective, or to its outputs."""
    try:
        return running.send(result)
    except StopIteration as end:
        return end.value


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Which values are not needed any more after a node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        found.setdefault(node, []).append(used)
    return found


def _finished(value: Any, used: fx.Node, by: fx.Node) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_finished(item, used, by) for item in value)
    if not isinstance(value, InFlight):
        return value
    if not value.is_done:
        raise VirtualRanksError(
            f"virtual ranks: {by.name} reads the result of {readable_name(used)}, which "
            "was not waited for; on real ranks its values may not have arrived."
        )
    return value.value


def _seen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_seen(item) for item in value]
    return value.value if isinstance(value, InFlight) else value


def _constant(node: fx.Node, held: object) -> Any:
    if held is None:
        raise VirtualRanksError(
            f"virtual ranks: the graph reads the constant {node.target} of a module, "
            "and no module was given. Pass the graph module, or constants=."
        )
    return operator.attrgetter(str(node.target))(held)
