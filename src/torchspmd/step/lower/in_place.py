"""New values computed in the memory of the old ones, instead of copied there afterwards.

A functional graph holds the old and the new value of every state at once. Where nothing
reads the old one any more, an operator may write into it: ``add`` becomes ``add_``,
``_fused_adam`` becomes ``_fused_adam_``. The same is done for values that the graph itself
made, which is what eager optimizers do.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import Aliases, find_aliases, operator_of, root_of
from torchspmd.step.graph.collectives import fit_to_gloo, reduce_in_place
from torchspmd.step.graph.metadata import (
    OutputKind,
    fake_value,
    output_node,
    output_values,
    roles_of,
    same_form,
    written_state,
)
from torchspmd.step.graph.nodes import drop_undone_transposes, replace_uses
from torchspmd.step.graph.optimizer_lists import is_fused_update, is_list_operator
from torchspmd.step.graph.snapshot import copy_graph


@dataclass(frozen=True, slots=True)
class InPlaceReport:
    """What became of the new values of a graph's states.

    Attributes:
        num_in_place: New values that are computed in the memory of the old one.
        num_temporaries: Operators that write into a value that the graph itself made.
        copied: States whose new value is copied there as soon as nothing reads the old
            one, each with what kept it from being computed there.
        left: States that are copied after the run, each with the reason.
    """

    num_in_place: int = 0
    num_temporaries: int = 0
    copied: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """One line for people.

        >>> print(InPlaceReport(2, 0, (("mean", "no in-place form"),)))
        new values: 2 computed in place, 1 copied as soon as known, 0 after the run
        """
        return (
            f"new values: {self.num_in_place} computed in place, {len(self.copied)} "
            f"copied as soon as known, {len(self.left)} after the run"
        )


@dataclass(frozen=True, slots=True)
class _Write:
    """One tensor that an in-place form writes, and the node of its new value.

    ``place`` is its place in the list that it stands in, or -1.
    """

    target: fx.Node
    out: fx.Node | None
    place: int = -1


def write_in_place(
    graph: fx.GraphModule, *, keep_inputs: bool = False
) -> tuple[fx.GraphModule, InPlaceReport]:
    """A copy of a functional graph that writes new values where the old ones lie.

    With ``keep_inputs`` it does so only for values that the graph itself made.
    """
    edited, _ = copy_graph(graph.graph)
    written = {} if keep_inputs else written_tensors(edited)
    report = compute_in_place(edited, written)
    reduce_in_place(edited)
    fit_to_gloo(edited)
    return _torch.lazy_module(graph, edited), report


def write_for_compiler(graph: fx.GraphModule) -> tuple[fx.GraphModule, InPlaceReport]:
    """A copy in which fused optimizers and collectives write in place, and little else.

    A compiler chooses itself where all else is computed.
    """
    edited, _ = copy_graph(graph.graph)
    report = compute_in_place(edited, written_tensors(edited), may_write=_is_called)
    reduce_in_place(edited)
    fit_to_gloo(edited)
    return _torch.lazy_module(graph, edited), report


def _is_called(node: fx.Node) -> bool:
    """Whether an operator is called in place: a fused update, and counters beside it."""
    if is_fused_update(node):
        return True
    if not is_list_operator(node):
        return False
    values = [fake_value(source) for source in node.all_input_nodes]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    is_known = all(each is not None for each in values)
    return is_known and all(each.numel() == 1 for each in tensors)


def written_tensors(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The states that are tensors and get a new value, by the node of that value."""
    values = output_values(graph)
    written: dict[fx.Node, fx.Node] = {}
    for index, state in written_state(graph).items():
        value = values[index]
        is_tensor = isinstance(state.meta.get("val"), torch.Tensor)
        if is_tensor and isinstance(value, fx.Node):
            written.setdefault(value, state)
    return written


def compute_in_place(
    graph: fx.Graph,
    written: Mapping[fx.Node, fx.Node],
    *,
    may_write: Callable[[fx.Node], bool] | None = None,
    scratch: Collection[fx.Node] = (),
) -> InPlaceReport:
    """Let operators write into memory whose value nothing needs any more.

    New values that are in place are outputs as their inputs. A result that would so become
    the memory of a state, and was not so when the step was captured, is copied last.

    Args:
        graph: A functional graph; its nodes have fake values in ``meta["val"]``.
        written: The inputs that get a new value, by the node of that value.
        may_write: Which operators may be changed, if not all: a compiler chooses itself
            where it computes.
        scratch: Inputs that are not needed after the graph: anything may be left in them.
    """
    if may_write is None:
        drop_undone_transposes(graph)
    forwarded = _find_forwarded(written)
    aliases = find_aliases(graph, forwarded)
    calls: dict[fx.Node, tuple[_Write, ...]] = {}
    obstacles: dict[fx.Node, str] = {}
    for node in graph.nodes:
        is_left = may_write is not None and not may_write(node)
        writes = () if is_left or node in forwarded else _find_writes(node)
        if writes:
            obstacle = _find_obstacle(node, writes, aliases, scratch)
            if obstacle is None:
                calls[node] = writes
            else:
                obstacles.update((write.out or node, obstacle) for write in writes)
    ends = {forwarded.get(value, value): place for value, place in written.items()}
    held = _drop_conflicts(calls, ends, aliases, scratch)
    nodes = list(graph.nodes)
    copies, copied, left = [], [], []
    for value, place in ends.items():
        if held.get(value) is place:
            continue
        name = str(place.meta.get("torchspmd_name", place.name))
        after, reason = _place_of_copy(nodes, value, place, aliases)
        if after is None:
            left.append((name, reason))
        else:
            copies.append((value, place, after))
            copied.append((name, obstacles.get(value) or _why(value)))
    inputs = set(held.values())
    report = InPlaceReport(
        sum(place in inputs for place in ends.values()),
        sum(
            not any(w.out in held or aliases.root[w.target] in inputs for w in writes)
            for writes in calls.values()
        ),
        tuple(copied),
        tuple(left),
    )
    replace_uses(forwarded)
    for copy_node in forwarded:
        graph.erase_node(copy_node)
    _edit(graph, calls, copies)
    copy_results(graph)
    graph.lint()
    return report


def _edit(
    graph: fx.Graph,
    calls: Collection[fx.Node],
    copies: Sequence[tuple[fx.Node, fx.Node, fx.Node]],
) -> None:
    """Give operators their in-place form, and copy new values to inputs after nodes."""
    moved: dict[fx.Node, fx.Node] = {}  # a node that is gone -> the call in its place
    became: dict[fx.Node, fx.Node] = {}  # its value -> what was written
    for node in calls:
        writes = _find_writes(node)  # again: targets may have been replaced
        for write in writes:
            if write.out is not None:
                became[write.out] = became.get(write.target, write.target)
        call = moved[node] = _add_in_place_form(graph, node)
        moved.update((write.out, call) for write in writes if write.out)
    replace_uses(became)
    for node in reversed([*calls]):
        _erase_with_items(graph, node)
    results: dict[fx.Node, fx.Node] = {}
    for value, place, after in copies:
        source = became.get(value, value)
        with graph.inserting_after(moved.get(after, after)):
            graph.call_function(torch.ops.aten.copy_.default, (place, source))
        results.setdefault(source, place)
    output = output_node(graph)
    output.args = fx.node.map_arg(output.args, lambda node: results.get(node, node))


def _add_in_place_form(graph: fx.Graph, node: fx.Node) -> fx.Node:
    form = _torch.in_place_form(operator_of(node))
    assert form is not None
    with graph.inserting_before(node):
        call = graph.call_function(form, node.args, node.kwargs)
    call.meta = {key: value for key, value in node.meta.items() if key != "val"}
    return call


def _erase_with_items(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a call whose results nothing uses any more."""
    for item in [*node.users]:
        for inner in [*item.users]:
            graph.erase_node(inner)
        graph.erase_node(item)
    graph.erase_node(node)


def _drop_conflicts(
    calls: dict[fx.Node, tuple[_Write, ...]],
    ends: Mapping[fx.Node, fx.Node],
    aliases: Aliases,
    scratch: Collection[fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Drop calls until every input that is written ends with its own new value.

    Returns the input that holds each value that is computed in one.
    """
    while True:
        held: dict[fx.Node, fx.Node] = {}  # value -> the memory that it is written to
        latest: dict[fx.Node, fx.Node] = {}
        chains: dict[fx.Node, list[fx.Node]] = {}
        for call, writes in calls.items():
            for write in writes:
                root = aliases.root[write.target]
                memory = held.get(root, root)
                if write.out is not None:
                    held[write.out] = memory
                if memory.op == "placeholder":
                    chains.setdefault(memory, []).append(call)
                    is_whole = write.target is root and write.out is not None
                    latest[memory] = write.out if is_whole and write.out else memory
        wrong = {
            call
            for place, value in latest.items()
            if ends.get(value) is not place and place not in scratch
            for call in chains[place]
        }
        if not wrong:
            return {v: m for v, m in held.items() if m.op == "placeholder"}
        for call in wrong:
            del calls[call]


def _find_forwarded(written: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copies into an input of a value that nothing else uses: that value will do."""
    found = {}
    for value, place in written.items():
        is_copy = value.target is torch.ops.aten.copy.default
        if not is_copy or value.args[0] is not place:
            continue
        source = value.args[1]
        assert isinstance(source, fx.Node), type(source)
        is_made = source.op == "call_function" and source not in written
        if is_made and len(source.users) == 1 and same_form(source, value):
            found[value] = source
    return found


def _place_of_copy(
    nodes: list[fx.Node], value: fx.Node, place: fx.Node, aliases: Aliases
) -> tuple[fx.Node | None, str]:
    """The node after which an input's memory may take its new value; or why none."""
    root = aliases.root[value]
    if root.op != "call_function" or {root, place} & aliases.pinned:
        return None, "its new value is another input, or a constant"
    target = place.meta.get("val")
    if not isinstance(target, torch.Tensor) or _overlaps_itself(target):
        return None, "its layout is not known, or several elements lie in one place"
    last = max(aliases.position[value], aliases.last_read.get(place, -1))
    if nodes[last].op == "output":
        return None, "its old value is returned"
    return nodes[last], ""


def _why(value: fx.Node) -> str:
    maker = value.args[0] if value.target is operator.getitem else value
    assert isinstance(maker, fx.Node)
    if _torch.in_place_form(operator_of(maker)) is None:
        return f"{maker.target} has no in-place form"
    return "the chain that ends in it does not begin at its old value"


# ----------------------------------------------------------------------------
# What an operator's in-place form would write, and what speaks against it.


def _find_writes(node: fx.Node) -> tuple[_Write, ...]:
    """What a node's in-place form would write; nothing where it has none."""
    form = _torch.in_place_form(operator_of(node))
    if form is None:
        return ()
    if isinstance(node.args[0], fx.Node):
        return (_Write(node.args[0], node),)
    if not isinstance(node.args[0], (list, tuple)):
        return ()  # 2 ** x: a number has no memory
    return tuple(_list_writes(node, _torch.written_arguments(form)))


def _list_writes(node: fx.Node, places: tuple[int, ...]) -> Iterator[_Write]:
    """The lists of ``_foreach_add`` or ``_fused_adam``, tensor by tensor."""
    results = _items(node)
    for number, place in enumerate(places):
        if place == 1 and node.kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes gradients only where it unscales them
        if len(places) > 1:
            whole = results.get(number)
            outs = {} if whole is None else _items(whole)
        else:
            outs = results
        tensors = node.args[place]
        assert isinstance(tensors, (list, tuple)), type(tensors)
        for index, tensor in enumerate(tensors):
            assert isinstance(tensor, fx.Node), type(tensor)
            yield _Write(tensor, outs.get(index), index)


def _items(node: fx.Node) -> dict[Any, fx.Node]:
    return {
        user.args[1]: user for user in node.users if user.target is operator.getitem
    }


def _find_obstacle(
    node: fx.Node,
    writes: tuple[_Write, ...],
    aliases: Aliases,
    scratch: Collection[fx.Node] = (),
) -> str | None:
    """Why a node must not write in place, as far as it alone can be judged."""
    is_list = not isinstance(node.args[0], fx.Node)
    if is_list and len(_items(node)) != len(node.users):
        return "its results are not taken one by one"
    form = _torch.in_place_form(operator_of(node))
    is_fused = len(_torch.written_arguments(form)) > 1
    if is_fused and _hands_gradients_on(node):
        return "the gradients that it hands on are used"
    read_at = _places_of_arguments(node, aliases)
    for write in writes:
        root = aliases.root[write.target]
        if write.out is None and not is_fused:
            return "not all of its results are used"
        reason = _memory_obstacle(write, root, aliases, scratch)
        if reason is None and aliases.last_read[root] > aliases.position[node]:
            reason = f"{write.target.name} is read later"
        if reason is None and not _reads_itself_only(write, read_at[root], is_fused):
            reason = f"{write.target.name} is read through another argument too"
        if reason is not None:
            return reason
    return None


def _hands_gradients_on(node: fx.Node) -> bool:
    gradients = _items(node).get(1)
    return gradients is not None and any(item.users for item in gradients.users)


def _memory_obstacle(
    write: _Write, root: fx.Node, aliases: Aliases, scratch: Collection[fx.Node]
) -> str | None:
    if root in aliases.pinned or root.op not in ("placeholder", "call_function"):
        return f"{root.name} is a constant, or used in a way that is not known"
    is_input = root.op == "placeholder" and root not in scratch
    if write.target is not root and is_input:
        return f"{write.target.name} is a view of an input"
    if write.out is not None and not same_form(write.target, write.out):
        return f"{write.out.name} has another shape, layout or dtype"
    value, base = write.target.meta.get("val"), root.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return f"the layout of {write.target.name} is not known"
    if _overlaps_itself(value):
        return f"{write.target.name} has several elements in one place"
    if base.numel() != value.numel():
        return f"{write.target.name} is a part of another tensor"
    return None


def _places_of_arguments(
    node: fx.Node, aliases: Aliases
) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
    """For each memory, which arguments lie in it and at which places of their lists."""
    found: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for argument in (*node.args, *node.kwargs.values()):
        is_list = isinstance(argument, (list, tuple))
        items: Any = argument if is_list else [argument]
        for place, item in enumerate(items):
            if isinstance(item, fx.Node):
                entry = (item, place if is_list else -1)
                found.setdefault(aliases.root[item], []).append(entry)
    return found


def _reads_itself_only(
    write: _Write, arguments: list[tuple[fx.Node, int]], is_fused: bool
) -> bool:
    """Whether the memory is read at the element that is written, and nowhere else."""
    if is_fused and len(arguments) > 1:
        return False
    return all(
        item is write.target and place == write.place for item, place in arguments
    )


def _overlaps_itself(value: torch.Tensor) -> bool:
    """Whether several elements lie in one place, as after ``expand``."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in pairs)


# ----------------------------------------------------------------------------
# Results that are not the memory of a state, unless the user's own step made them so.
#
# ``return model.weight`` gives the weight itself, as in eager. An edit that drops the copy
# of ``return model.weight.clone()`` makes the same graph. So which inputs
# the captured step returns is written on them, before anything edits it.

_KEY = "torchspmd_returned"
_CLONE = torch.ops.aten.clone.default


def mark_returned(graph: fx.Graph) -> None:
    """Write on each input whether a captured step returns its memory.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> x.meta["val"] = y.meta["val"] = torch.empty(1)
    >>> output = graph.output([x, graph.call_function(_CLONE, (y,))])
    >>> mark_returned(graph)
    >>> x.meta["torchspmd_returned"], y.meta["torchspmd_returned"]
    (True, False)
    """
    returned = {root_of(value) for _, value in _results(graph)}
    values = output_values(graph)
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[_KEY] = node in returned
    for index, state in written_state(graph).items():
        value = values[index]
        if isinstance(value, fx.Node) and root_of(value) in returned:
            state.meta[_KEY] = True


def copy_results(graph: fx.Graph) -> None:
    """Copy each result that would be the memory of an input that is not returned.

    Where nothing was written on the inputs, nothing is known, and nothing is copied.

    Args:
        graph: A graph whose new values are in place; each output is as the caller gets
            it right after the run, so that the end is the place for the copies.
    """
    inputs = graph.find_nodes(op="placeholder")
    own = {node for node in inputs if node.meta.get(_KEY) is False}
    if not own:
        return
    output = output_node(graph)
    copies: dict[int, fx.Node] = {}
    for place, value in _results(graph):
        if root_of(value) in own:
            with graph.inserting_before(output):
                copies[place] = graph.call_function(_CLONE, (value,))
            copies[place].meta["val"] = value.meta.get("val")
    (values,) = output.args
    if isinstance(values, (list, tuple)):
        output.args = ([copies.get(place, v) for place, v in enumerate(values)],)
    else:
        output.args = (copies.get(0, values),)


def _results(graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """The outputs that the caller gets as they are, by place."""
    pairs = zip(output_values(graph), roles_of(graph), strict=True)
    for place, (value, role) in enumerate(pairs):
        if isinstance(value, fx.Node) and role.kind is not OutputKind.STATE:
            yield place, value
