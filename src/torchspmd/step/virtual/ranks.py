"""Virtual ranks: a program run for N ranks in one process, in lockstep.

Every rank runs to its next collective; that runs once for all ranks of its group, adding
their values in an order that can be chosen.
"""

import contextlib
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import fx

from torchspmd.errors import UsageError, VirtualRanksError
from torchspmd.step.graph.comm_blocks import is_wait
from torchspmd.step.graph.reports import ORDERS
from torchspmd.step.graph.roles import readable_name
from torchspmd.step.virtual.axes import DEFAULT_SIZE, RankLayout, collective, lay_out
from torchspmd.step.virtual.collectives import Started, communicate, wait
from torchspmd.step.virtual.random_numbers import Generators, is_random

Watcher = Callable[[int, fx.Node, Any], None]  # (rank, node, its value)
Graphs = Any  # a graph, or whatever has one; or one of them for each rank


@final
class VirtualRanks:
    """N ranks of one program in one process.

    Args:
        layout: How many ranks there are and who communicates with whom; see ``lay_out``.
        order: In which order reductions add: ``rank``, ``ring`` (gloo's) or ``tree``.
        seed: Virtual rank r draws its random numbers as if seeded with ``seed + r``.

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
            if is_random(node):
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
        outputs: list[Any] = end.value
        return outputs


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
    if not isinstance(value, Started):
        return value
    if not value.is_done:
        raise VirtualRanksError(
            f"virtual ranks: {by.name} reads the result of {readable_name(used)}, which "
            "nobody has waited for; on real ranks its values may not have arrived."
        )
    return value.value


def _seen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_seen(item) for item in value]
    return value.value if isinstance(value, Started) else value


def _constant(node: fx.Node, held: object) -> Any:
    if held is None:
        raise VirtualRanksError(
            f"virtual ranks: the graph reads the constant {node.target} of a module, "
            "and no module was given. Pass the graph module, or constants=."
        )
    return operator.attrgetter(str(node.target))(held)
