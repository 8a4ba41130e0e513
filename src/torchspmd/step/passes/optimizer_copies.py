"""Copies after an optimizer that add nothing: its new values are the outputs themselves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from torchspmd.step.graph.aliases import find_aliases
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.graph.roles import (
    OutputKind,
    output_values,
    roles_of,
    written_state,
)
from torchspmd.step.iterate.deferral import is_view
from torchspmd.step.passes.ordering import graph_optimization_pass

_COPIES = (torch.ops.aten.copy.default, torch.ops.aten.clone.default)


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def remove_copy_from_optimizer(gm: Any) -> Outcome:
    """Let each state's next value be what the optimizer made, not a copy of it.

    New values are written into the user's tensors when the step runs, in place where
    nothing reads the old value any more; a copy inside the graph only takes memory.
    A copy stays that keeps what the step returns, or leaves as a gradient, apart from
    the memory of a state.
    """
    graph: fx.Graph = gm.graph
    values = output_values(graph)
    memory = _OutputMemory(graph)
    matched = changed = 0
    refused = []
    for index, state in written_state(graph).items():
        copy = values[index]
        if not isinstance(copy, fx.Node) or copy.target not in _COPIES:
            continue
        matched += 1
        source = copy.args[-1] if copy.target is _COPIES[0] else copy.args[0]
        assert isinstance(source, fx.Node)
        if not _same_form(copy, source):
            refused.append(f"{copy.name} of {source.name} for {state.name} converts it")
            continue
        if source.op == "placeholder" or is_view(source):
            refused.append(f"{source.name} for {state.name} is memory of another value")
            continue
        taken = memory.join(copy, source)
        if taken is not None:
            refused.append(
                f"{source.name} for {state.name} is handed out by the step ({taken}), "
                "which must not be the memory of a state"
            )
            continue
        copy.replace_all_uses_with(source)
        changed += 1
    return Outcome(matched, changed, tuple(refused), keeps_bits=ORDERS)


class _OutputMemory:
    """Which outputs lie in the memory of a node, while copies go away."""

    def __init__(self, graph: fx.Graph) -> None:
        self._root: Mapping[fx.Node, fx.Node] = find_aliases(graph).root
        self._joined: dict[fx.Node, fx.Node] = {}  # a copy -> the memory of its source
        self._states: set[fx.Node] = set()
        self._handed_out: dict[fx.Node, str] = {}  # to the caller, as they are
        pairs = zip(output_values(graph), roles_of(graph), strict=True)
        for place, (value, role) in enumerate(pairs):
            if not isinstance(value, fx.Node):
                continue
            if role.kind is OutputKind.STATE:
                self._states.add(self._root[value])
            else:
                name = f"output {place}, a {role.kind.value}"
                self._handed_out.setdefault(self._root[value], name)

    def join(self, copy: fx.Node, source: fx.Node) -> str | None:
        """Let a state's copy be its source; or say which output forbids it.

        What already was the memory of the same state may stay so, as in eager.
        """
        one, two = self._of(copy), self._of(source)
        taken = self._handed_out.get(two)
        if taken is None and two in self._states:
            taken = self._handed_out.get(one)
        if taken is None:
            self._joined[one] = two
            self._states.add(two)
            if one in self._handed_out:
                self._handed_out[two] = self._handed_out[one]
        return taken

    def _of(self, node: fx.Node) -> fx.Node:
        root = self._root[node]
        while root in self._joined:
            root = self._joined[root]
        return root


def _same_form(copy: fx.Node, source: fx.Node) -> bool:
    """Whether a copy has the shape, the dtype and the strides of what it copies."""
    made, given = copy.meta.get("val"), source.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return (made.shape, made.dtype, made.stride()) == (
        given.shape,
        given.dtype,
        given.stride(),
    )
