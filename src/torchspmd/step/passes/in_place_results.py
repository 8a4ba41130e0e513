"""Results that are not the memory of a state, unless the user's own step made them so.

``return model.weight`` gives the weight itself, as in eager. An edit that drops the copy
of ``return model.weight.clone()`` makes the same graph. So what the captured step hands
out is written on its inputs, before anything edits it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from torchspmd.step.graph.aliases import find_aliases
from torchspmd.step.graph.roles import (
    OutputKind,
    output_node,
    output_values,
    roles_of,
    written_state,
)

_KEY = "torchspmd_handed_out"
_CLONE = torch.ops.aten.clone.default


def mark_handed_out(graph: fx.Graph) -> None:
    """Write on each input whether a captured step hands its memory to the caller.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> x.meta["val"] = y.meta["val"] = torch.empty(1)
    >>> output = graph.output([x, graph.call_function(_CLONE, (y,))])
    >>> mark_handed_out(graph)
    >>> x.meta["torchspmd_handed_out"], y.meta["torchspmd_handed_out"]
    (True, False)
    """
    root = find_aliases(graph).root
    handed_out = {root[value] for _, value in _handed_out(graph)}
    values = output_values(graph)
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[_KEY] = node in handed_out
    for index, state in written_state(graph).items():
        value = values[index]
        if isinstance(value, fx.Node) and root[value] in handed_out:
            state.meta[_KEY] = True


def keep_apart(graph: fx.Graph) -> int:
    """Copy what would be handed out as the memory of an input; how many there are.

    Where nothing was written on the inputs, nothing is known, and nothing is copied.

    Args:
        graph: A graph whose new values are in place; each output is as the caller gets
            it right after the run, so that the end is the place for the copies.
    """
    inputs = graph.find_nodes(op="placeholder")
    own = {node for node in inputs if node.meta.get(_KEY) is False}
    if not own:
        return 0
    root = find_aliases(graph).root
    places: dict[int, fx.Node] = {}
    output = output_node(graph)
    for place, value in _handed_out(graph):
        if root[value] in own:
            with graph.inserting_before(output):
                places[place] = graph.call_function(_CLONE, (value,))
            places[place].meta["val"] = value.meta.get("val")
    _replace(output, places)
    return len(places)


def _handed_out(graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """The outputs that the caller gets as they are, by place."""
    pairs = zip(output_values(graph), roles_of(graph), strict=True)
    for place, (value, role) in enumerate(pairs):
        if isinstance(value, fx.Node) and role.kind is not OutputKind.STATE:
            yield place, value


def _replace(output: fx.Node, places: Mapping[int, fx.Node]) -> None:
    (values,) = output.args
    if isinstance(values, (list, tuple)):
        output.args = ([places.get(place, v) for place, v in enumerate(values)],)
    else:
        output.args = (places.get(0, values),)
