"""A function with its layouts, and the plans of the kinds of calls that it has seen."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.local.call import Call, keep
from torchspmd.local.plan import OnMesh, Options, Plan, build_plan, find_on_mesh
from torchspmd.local.traced import call_traced

# Leaves that need no tree to be taken apart; most calls have only these.
_PLAIN = frozenset({DTensor, torch.Tensor, int, float, bool, str, type(None)})


class Region:
    """A function together with the layouts of what goes in and out."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._plans: dict[Any, Plan] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function once on local tensors."""
        if torch.compiler.is_dynamo_compiling():
            return call_traced(self.options, args, kwargs)
        if "torch._dynamo" in sys.modules:
            return _untraced()(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function once on local tensors, while nothing is compiled."""
        if kwargs or not all(type(arg) in _PLAIN for arg in args):
            leaves, structure = _torch.flatten_tree((args, kwargs))
        else:
            leaves, structure = list(args), len(args)
        tensors = find_on_mesh(leaves)
        if not tensors:
            return self.options.function(*args, **kwargs)
        plan = self._plan(args, kwargs, leaves, structure, tensors)
        call = Call(self.options, plan, tensors)
        values = call.enter(leaves)
        if isinstance(structure, int):
            args = tuple(values)
        else:
            args, kwargs = _torch.unflatten_tree(values, structure)
        return call.leave(call.run(args, kwargs))

    def _plan(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        structure: Any,
        tensors: Sequence[OnMesh],
    ) -> Plan:
        on_mesh = [(t.leaf, t.slot and t.slot[0], *_place(t.tensor)) for t in tensors]
        key = (structure, tuple(on_mesh), tuple([type(leaf) for leaf in leaves]))
        plan = self._plans.get(key)
        if plan is None:
            plan = build_plan(self.options, args, kwargs, tensors)
            keep(self._plans, key, plan)
        return plan


@functools.cache
def _untraced() -> Callable[[Region, tuple[Any, ...], dict[str, Any]], Any]:
    """``Region.run`` where compiled code fell back to eager: Dynamo must not enter it.

    Made on demand, as it imports all of Dynamo.
    """
    untraced: Callable[..., Any] = torch.compiler.disable(Region.run)
    return untraced


def _place(tensor: DTensor) -> tuple[Any, Any, int]:
    return tensor.placements, tensor.device_mesh, tensor.ndim
