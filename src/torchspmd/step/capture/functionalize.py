"""A traced graph without operators that write into a tensor.

Where memory that is written has one name, a write becomes the operator that gives the new
value, and what follows takes that. A graph that reads written memory through views is
traced once more instead, while torch replaces its writes.
"""

import operator
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import (
    Write,
    find_aliases,
    find_writes,
    operator_of,
)
from torchspmd.step.graph.metadata import META_KEY, annotate_after, last_node
from torchspmd.step.graph.nodes import drop_dead_code, fake_result, replace_uses


def make_functional(
    traced: fx.GraphModule, flat: list[Any], world: _torch.FakeWorld
) -> fx.GraphModule:
    """The same graph without an operator that writes into a tensor."""
    _drop_profiler_marks(traced.graph)
    writes = _Writes(traced.graph)
    if can_rewrite(writes):
        _rewrite(writes)
        graph = traced
    else:
        graph = _trace_again(traced, flat, world)
    _let_views_copy(graph.graph)
    return graph


# ----------------------------------------------------------------------------
# Memory that has one name: each write becomes a new value.


class _Writes:
    """The memory of a graph's values, and the calls that write into it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.aliases = find_aliases(graph)
        found = ((node, find_writes(node)) for node in graph.nodes)
        self.of = {node: writes for node, writes in found if writes}

    def root(self, node: fx.Node) -> fx.Node:
        """What made the memory of a value."""
        return self.aliases.root[node]

    def is_name(self, node: fx.Node) -> bool:
        """Whether a value is all of its memory: as made, or as a write returns it."""
        return node in self.of or self.aliases.root[node] is node


def can_rewrite(writes: _Writes) -> bool:
    """Whether all that is written has one name, and no view is read across a write."""
    position = writes.aliases.position
    places: dict[fx.Node, list[int]] = {}
    for node, each in writes.of.items():
        if _torch.functional_form(node.target) is None:
            return False
        if not all(writes.is_name(write.node) for write in each):
            return False
        for write in each:
            places.setdefault(writes.root(write.node), []).append(position[node])
    if not writes.aliases.pinned.isdisjoint(places) or not _are_separate(
        writes, places
    ):
        return False
    for node, place in position.items():
        written = places.get(writes.root(node))
        if written and not writes.is_name(node):
            last = max((position[user] for user in node.users), default=place)
            if any(place < each < last for each in written):
                return False
    return True


def _are_separate(writes: _Writes, written: Collection[fx.Node]) -> bool:
    """Whether no two inputs or results share memory that is written."""
    keys = {
        node: _torch.storage_key(node.meta["val"])
        for node, root in writes.aliases.root.items()
        if node is root and isinstance(node.meta.get("val"), torch.Tensor)
    }
    count = Counter(keys.values())
    return all(root in keys and count[keys[root]] == 1 for root in written)


def _rewrite(writes: _Writes) -> None:
    """Have each write make a new value, which the nodes behind it take."""
    newest: dict[fx.Node, fx.Node] = {}

    def now(node: fx.Node) -> fx.Node:
        is_new = node not in writes.aliases.position
        if is_new or not writes.is_name(node):
            return node
        return newest.get(writes.root(node), node)

    for node in writes.aliases.position:
        if any(now(source) is not source for source in node.all_input_nodes):
            taken: Any = fx.node.map_arg((node.args, node.kwargs), now)
            node.args, node.kwargs = taken
        if node in writes.of:
            with writes.graph.inserting_before(node):
                values = _Writer(node).new_values()
            roots = [writes.root(write.node) for write in writes.of[node]]
            newest.update(zip(roots, values, strict=True))
    for node in reversed(writes.of):
        writes.graph.erase_node(node)


class _Writer:
    """A call that writes into tensors, and what computes the new values instead."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._meta = {key: each for key, each in node.meta.items() if key != "val"}

    def new_values(self) -> list[fx.Node]:
        """Add nodes that compute what the call writes, in the order of its writes."""
        node = self._node
        target = operator_of(node)
        form = None if target is None else _torch.functional_form(target)
        assert form is not None, node
        made = self._call(form.operator, node.args, node.kwargs, _kept_layout(node))
        if form.num_results:  # the new values come behind them
            node.replace_all_uses_with(made)
        parts = {0: made}
        if form.num_returns > 1:
            places = sorted({write.argument for write in find_writes(node)})
            parts = {n: self._item(made, form.num_results + n) for n in places}
        return [self._new_value(parts[w.argument], w) for w in find_writes(node)]

    def _new_value(self, part: fx.Node, write: Write) -> fx.Node:
        value = part if write.item is None else self._item(part, write.item)
        if _torch.is_fused_optimizer(self._node.target):
            value = self._call(torch.ops.aten.copy.default, (write.node, value))
        kept = write.node.meta["val"].dtype
        if value.meta["val"].dtype != kept:  # an operator that writes casts to this
            cast = torch.ops.aten._to_copy.default
            value = self._call(cast, (value,), {"dtype": kept, "layout": torch.strided})
        return value

    def _item(self, values: fx.Node, place: int) -> fx.Node:
        fake = values.meta["val"][place]
        return self._call(operator.getitem, (values, place), fake=fake)

    def _call(
        self, target: Any, args: Any, options: Any = None, fake: Any = None
    ) -> fx.Node:
        name = None  # as a tracer calls it, without the overload
        if isinstance(target, _torch.OpOverload):
            name = _torch.packet_name(target).rpartition("::")[2]
        graph = self._node.graph
        made = graph.create_node("call_function", target, args, options, name)
        if fake is None:
            values = {source: source.meta["val"] for source in made.all_input_nodes}
            fake = fake_result(made, values)
        made.meta = {**self._meta, "val": fake}
        return made


def _kept_layout(node: fx.Node) -> Any:
    """The fake tensors that a call writes, where the new values must look like them."""
    if not _torch.is_elementwise(node.target):
        return None
    given: Any = fx.node.map_arg(
        (*node.args, *node.kwargs.values()), lambda each: each.meta["val"]
    )
    written, others = given[0], given[1:]
    if not isinstance(written, (list, tuple)):
        return written if all(_looks_like(written, each) for each in others) else None
    for each in others:
        items = each if isinstance(each, (list, tuple)) else [each] * len(written)
        if not all(map(_looks_like, written, items)):
            return None
    return written


def _looks_like(written: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor):
        return True  # a number does not change what a tensor of this dtype becomes
    if other.dtype != written.dtype:
        return False
    is_same = other.shape == written.shape and other.stride() == written.stride()
    return is_same or not other.ndim


# ----------------------------------------------------------------------------
# Any other graph: traced again.


def _trace_again(
    traced: fx.GraphModule, flat: list[Any], world: _torch.FakeWorld
) -> fx.GraphModule:
    inputs = [
        value.detach() if isinstance(value, torch.Tensor) else value for value in flat
    ]
    with world.mode, world.reading_values(), torch.no_grad():
        graph = _torch.trace(_torch.functional(_Replay(traced).replay), inputs)
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    ):
        # Functional form writes the new values back at the end; a program does that.
        if node.args[0].op == "placeholder":
            graph.graph.erase_node(node)
    return graph


class _Replay(fx.Interpreter):
    """Runs a graph while another is traced, and hands each node's owner on."""

    def replay(self, *flat: Any) -> Any:
        """Run the graph on flat inputs."""
        return self.run(*flat, enable_io_processing=False)

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
        if not _torch.is_fused_optimizer(target):
            return super().call_function(target, args, kwargs)
        form = _torch.functional_form(target)
        assert form is not None, target
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        made = form.operator(*args, **kwargs)
        for old, new in zip(lists, made, strict=False):
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


# ----------------------------------------------------------------------------
# What a graph needs to run like the step it was traced from, and what it does not need.

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


_TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def clean(graph: fx.GraphModule) -> None:
    """Remove what does nothing in a functional graph: detach, equal views, dead code."""
    same = {
        node: node.args[0]
        for node in graph.graph.nodes
        if (node.op == "call_function" and node.target in _TRANSPARENT)
        or _is_same_view(node)
    }
    replace_uses(same)
    drop_dead_code(graph.graph)
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
