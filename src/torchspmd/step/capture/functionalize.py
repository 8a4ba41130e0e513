"""A traced graph without operators that write into a tensor.

Up to the first write a graph is functional as it is: those nodes are taken over. Only the
rest, mostly the optimizer, is traced once more while torch replaces its writes.
"""

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of, written_nodes
from torchspmd.step.graph.metadata import META_KEY, annotate_after, last_node


def make_functional(
    traced: fx.GraphModule, flat: list[Any], world: _torch.FakeWorld
) -> fx.GraphModule:
    """The same graph without an operator that writes into a tensor."""
    _drop_profiler_marks(traced.graph)
    kept = _before_first_write(traced.graph)
    early = set(kept)
    crossing = [node for node in kept if not early.issuperset(node.users)]
    if not _can_cut(traced.graph, crossing):
        kept, crossing = [], []
    inputs = [*flat, *(node.meta["val"] for node in crossing)]
    inputs = [
        value.detach() if isinstance(value, torch.Tensor) else value for value in inputs
    ]
    run = _torch.functional(_Replay(traced, kept, crossing).replay)
    with world.mode, world.reading_values(), torch.no_grad():
        rest = _torch.trace(run, inputs)
    for node in rest.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    ):
        # Functional form writes the new values back at the end; a program does that.
        if node.args[0].op == "placeholder":
            rest.graph.erase_node(node)
    graph = _joined(traced, kept, crossing, rest) if kept else rest
    _let_views_copy(graph.graph)
    return graph


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
# They keep the order of elements in memory.
_IN_ORDER = (
    *_VIEWS,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.unsqueeze.default,
)


def _let_views_copy(graph: fx.Graph) -> None:
    """Make reshapes of views that may not fit to what a kernel makes when it runs.

    Some kernels lay their result out in another order than was traced (batch norm of a
    transposed input): then eager's reshape copies, and so must the graph's.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            if _may_be_strided(node.args[0]):
                node.target = torch.ops.aten.reshape.default


def _may_be_strided(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        return True
    while _torch.is_view(node.target):
        if node.target not in _IN_ORDER:
            return True
        node = node.all_input_nodes[0]
    return False


def _drop_profiler_marks(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if "profiler" in str(node.target) and not node.users:
            graph.erase_node(node)


def _before_first_write(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are functional as they are, in order."""
    kept = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op != "get_attr" and not _is_functional(node):
            break
        kept.append(node)
    return kept


def _is_functional(node: fx.Node) -> bool:
    called = operator_of(node)
    if called is None:
        return _computes_number(node) or node.target is operator.getitem
    return not _torch.written_arguments(called)


def _can_cut(graph: fx.Graph, crossing: list[fx.Node]) -> bool:
    """Whether each tensor that is written later is known by one name there.

    A view that is taken before the cut and read after a write behind it would show the
    old values: then all of the graph is traced again.
    """
    entering = [*graph.find_nodes(op="placeholder"), *crossing]
    values = [node.meta.get("val") for node in entering]
    if not all(isinstance(v, (torch.Tensor, *_torch.numbers.SYMBOLIC)) for v in values):
        return False
    names = Counter(
        _torch.storage_key(value) for value in values if isinstance(value, torch.Tensor)
    )
    return all(names[key] <= 1 for key in _written_memory(graph))


def _written_memory(graph: fx.Graph) -> set[int]:
    written = (each for node in graph.nodes for each in written_nodes(node))
    values = [node.meta.get("val") for node in written]
    return {_torch.storage_key(v) for v in values if isinstance(v, torch.Tensor)}


def _joined(
    traced: fx.GraphModule,
    kept: list[fx.Node],
    crossing: list[fx.Node],
    rest: fx.GraphModule,
) -> fx.GraphModule:
    """The nodes that were kept, and behind them those that were traced again."""
    graph = fx.Graph()
    places = rest.graph.find_nodes(op="placeholder")
    entering = len(places) - len(crossing)
    copies = {place: graph.node_copy(place) for place in places[:entering]}
    heads = traced.graph.find_nodes(op="placeholder")
    known = {head: copies[place] for head, place in zip(heads, places, strict=False)}
    for node in kept:
        known[node] = graph.node_copy(node, known.__getitem__)
        if node.op == "get_attr":
            known[node].target = f"kept_{node.target}"
            setattr(rest, f"kept_{node.target}", getattr(traced, str(node.target)))
    for place, node in zip(places[entering:], crossing, strict=True):
        copies[place] = known[node]
    for node in rest.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return _torch.lazy_module(rest, graph)


class _Replay(fx.Interpreter):
    """Runs a graph while another is traced, and hands each node's owner on."""

    def __init__(
        self, traced: fx.GraphModule, kept: list[fx.Node], crossing: list[fx.Node]
    ) -> None:
        super().__init__(traced)
        self._kept, self._crossing = kept, crossing

    def replay(self, *flat: Any) -> Any:
        """Run the graph on flat inputs, and on values from before where it begins."""
        count = len(flat) - len(self._crossing)
        values = dict.fromkeys(self._kept, None)
        values.update(zip(self._crossing, flat[count:], strict=True))
        return self.run(*flat[:count], initial_env=values, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; the nodes that this makes belong to the same owner."""
        graph = _torch.current_graph()
        last = last_node(graph)
        if _computes_number(n):
            result = _torch.numbers.copy_number(
                n, self.fetch_args_kwargs_from_env(n)[0]
            )
        else:
            result = super().run_node(n)
        annotate_after(graph, last, n.meta.get(META_KEY))
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; a fused optimizer in its functional form, then copied back."""
        if target is torch.ops.aten.bernoulli_.float and not args[0].is_contiguous():
            target(_in_memory_order(args[0]), *args[1:], **kwargs)
            return args[0]
        functional = _torch.functional_optimizer(target)
        if functional is None:
            return super().call_function(target, args, kwargs)
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        for old, new in zip(lists, functional(*args, **kwargs), strict=False):
            # The gradients are read only, except where a loss scale is taken out.
            if old is not args[1] or kwargs.get("grad_scale") is not None:
                for target_tensor, value in zip(old, new, strict=True):
                    target_tensor.copy_(value)
        return None


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose dims are in the order in which they lie in memory.

    ``bernoulli_`` draws in this order, and its functional form in the order of dims.
    """
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


def _computes_number(node: fx.Node) -> bool:
    is_call = node.op == "call_function" and operator_of(node) is None
    return is_call and isinstance(node.meta.get("val"), _torch.numbers.SYMBOLIC)


_TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def clean(graph: fx.GraphModule) -> None:
    """Remove what does nothing in a functional graph: detach, equal views, dead code."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
        elif _is_same_view(node):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()


def _is_same_view(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not torch.ops.aten.view.default:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if len(node.all_input_nodes) > 1:  # a size that is another one in another call
        return False
    return before.shape == after.shape and before.stride() == after.stride()
