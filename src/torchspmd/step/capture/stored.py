"""Tensors in plain attributes: what a step stores there, and what the next one finds.

Routers of experts keep their auxiliary loss on the module, layers with weight norm their
weight, trainers their last loss. What a step stores in an attribute of a module, or of an
object that the step is a method of or gets passed, is one more result of the graph, which
each call puts there anew. A tensor that an earlier call has stored is an input.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from torchspmd import _torch
from torchspmd.step.capture.python_values import is_users_object
from torchspmd.step.capture.user_code import attribute_of

# What most attributes are: nothing to look into.
_PLAIN = frozenset(
    {
        *(bool, int, float, str, type(None), torch.Tensor, nn.Parameter),
        *(dict, OrderedDict, list, tuple, set),
    }
)
_DEPTH = 3  # objects in attributes of objects that are looked into


@dataclass(frozen=True, slots=True)
class Address:
    """Where an object is that holds tensors: found anew in each call, in its own objects.

    Attributes:
        root: What holds it: a model or an argument by its number; -1 for what the step is
            a method of.
        is_module: Whether the root is a model.
        path: The module of the model, if it is one.
        keys: The attributes that lead from there to the object.
    """

    root: int
    is_module: bool = False
    path: str = ""
    keys: tuple[str, ...] = ()

    def holder_in(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        leaves: Sequence[Any],
        function: Callable[..., Any] | None,
    ) -> Any:
        """The object, in a call with these models and arguments."""
        found: Any
        if self.is_module:
            found = modules[self.root][1].get_submodule(self.path)
        else:
            found = owner_of(function) if self.root < 0 else leaves[self.root]
        for key in self.keys:
            found = vars(found)[key]
        return found


def owner_of(function: Any) -> Any:
    """The object whose method a step is, or that is called as a step; None for others."""
    while isinstance(inner := attribute_of(function, "func"), Callable):  # type: ignore[arg-type]
        function = inner
    owner = function.__self__ if isinstance(function, MethodType) else function
    return owner if is_users_object(owner) else None


def holders_in(
    modules: Sequence[tuple[str, nn.Module]],
    leaves: Sequence[Any],
    names: Sequence[str],
    function: Callable[..., Any] | None,
) -> Iterator[tuple[str, Address, Any]]:
    """Each object of a call whose attributes may hold tensors, with name and address."""
    seen: set[int] = set()
    for number, (name, model) in enumerate(modules):
        for path, child in model.named_modules():
            address = Address(number, is_module=True, path=path)
            label = f"{name}.{path}" if path else name
            yield from _with_inner(label, address, child, seen)
    roots = [(-1, "self", owner_of(function))]
    roots += [(n, names[n], leaf) for n, leaf in enumerate(leaves)]
    for number, name, root in roots:
        if is_users_object(root):
            yield from _with_inner(name, Address(number), root, seen)


def _with_inner(
    name: str, address: Address, holder: Any, seen: set[int]
) -> Iterator[tuple[str, Address, Any]]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    yield name, address, holder
    if len(address.keys) == _DEPTH:
        return
    for key, value in vars(holder).items():
        if type(value) not in _PLAIN and is_users_object(value):
            inner = Address(
                address.root, address.is_module, address.path, (*address.keys, key)
            )
            yield from _with_inner(f"{name}.{key}", inner, value, seen)


def is_holdable(value: Any) -> bool:
    """Whether a tensor can be an input by the place that holds it.

    One that requires gradients is not: what is computed from it would not reach them.
    """
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and not value.is_nested
        and not _torch.is_fake(value)
    )
