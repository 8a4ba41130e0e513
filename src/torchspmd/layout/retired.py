"""Retired parameters: plain parameters whose place in a model was taken by a DTensor.

An optimizer, a list or another module that still holds one works on a tensor that the
model no longer reads. ``parallelize_module`` makes its gradient an error; the mode
'fully_shard' of a step frees its memory and makes every use an error.
"""

import weakref
from collections.abc import Mapping
from functools import cache
from types import new_class
from typing import Any, NoReturn

import torch
from torch import nn

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError

# Set on a retired parameter: its name, for texts, and what is in its place, so that
# a second module that is tied to it gets the same DTensor and not another copy.
_NAME = "_torchspmd_name"
_SUCCESSOR = "_torchspmd_successor"
_PREDECESSOR = "_torchspmd_predecessor"  # set on a shard: what it replaced


class _Predecessor:
    """What a shard has replaced, in no copy of the shard.

    It has no values any more, but it must live: another tensor could get its identity, and
    be taken for the shard. Not a table with weak keys: torch converts no parameter
    (``model.double()``) that a weak reference points to.
    """

    def __init__(self, parameter: torch.Tensor | None = None) -> None:
        self.parameter = parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Predecessor":
        return _Predecessor()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Predecessor, ()


class _Untrainable:
    """May be read and copied; asking for its gradient, or setting one, raises."""

    requires_grad: bool

    @property
    def grad(self) -> None:
        """There is none that would change the model; a frozen one expects none."""
        if self.requires_grad:
            _refuse_gradient(_name_of(self))

    @grad.setter
    def grad(self, value: object) -> None:
        if self.requires_grad or value is not None:
            _refuse_gradient(_name_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = self._plain(clone=True)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain(clone=False).__reduce_ex__(protocol)

    def _plain(self: Any, *, clone: bool) -> nn.Parameter:
        """A parameter of its own, which nothing has replaced."""
        return nn.Parameter(
            self.data.clone() if clone else self.data, self.requires_grad
        )


class _Freed:
    """Has no values any more; every function of torch that gets it raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = _name_of(next(_torch.leaves_of(cls, (args, kwargs))))
        raise UsageError(
            f"{name}: this is the whole parameter from before the first step; "
            "DataParallel('fully_shard') put a shard in its place. Take it from the model "
            "again (model.parameters()), and pass every optimizer and module that holds "
            "it to the step, or make them after the first step."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{_name_of(self)}: replaced by its shard>"


@cache
def _retired_class(how: type, kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of retired parameters that were of this one, with what it adds."""
    return new_class(f"Retired{kind.__name__}", (how, kind))


def _name_of(parameter: Any) -> str:
    return str(vars(parameter).get(_NAME, "a parameter"))


def is_retired(value: Any) -> bool:
    """Whether a value is a parameter from before."""
    return isinstance(value, (_Untrainable, _Freed))


def free_retired(parameter: torch.Tensor, name: str) -> None:
    """Free the memory of a parameter that a shard has replaced; using it is an error."""
    parameter.grad = None
    setattr(parameter, _NAME, name)
    if _torch.layout_of(parameter) is None:
        parameter.data = parameter.data.new_empty(0)
    else:
        _torch.free_shard(parameter)
    parameter.__class__ = _retired_class(_Freed, type(parameter))


def refuse_training(parameter: torch.Tensor, name: str) -> None:
    """Make training a parameter that a DTensor has replaced an error.

    Raises:
        TypeError: The class of the parameter has no subclasses, so it cannot be marked.
    """
    if is_retired(parameter):
        return
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: _refuse_gradient(name))
    setattr(parameter, _NAME, name)
    parameter.__class__ = _retired_class(_Untrainable, type(parameter))


def _refuse_gradient(name: str) -> NoReturn:
    raise LayoutError(
        f"{name} has been replaced by parallelize_module, and this is the tensor from "
        "before, which the model does not use: its gradient is asked for or arrives "
        "here. Make optimizers, averages and lists of parameters after "
        "parallelize_module, from model.parameters(), and run forward and backward on "
        "the same side of it. If another module shares the parameter, lay out both in "
        "one plan, with the same layout, or untie them first."
    )


def successor(parameter: torch.Tensor) -> Any:
    """The DTensor that has replaced a parameter; None where none has."""
    found = getattr(parameter, _SUCCESSOR, None)
    return None if found is None else found()


def set_successor(parameter: torch.Tensor, placed: torch.Tensor) -> None:
    """Note which DTensor has replaced a parameter, for as long as a model holds it."""
    setattr(parameter, _SUCCESSOR, weakref.ref(placed))


def copy_attributes(parameter: torch.Tensor, placed: torch.Tensor) -> None:
    """Copy what users set on a parameter, such as the optimizer group it belongs to.

    A tensor of its shape, such as a buffer for gradients, does not fit the new one.
    """
    for name, value in vars(parameter).items():
        fits = not (isinstance(value, torch.Tensor) and value.shape == parameter.shape)
        if name not in (_NAME, _SUCCESSOR, _PREDECESSOR) and fits:
            setattr(placed, name, value)


def note_predecessor(placed: torch.Tensor, parameter: torch.Tensor) -> None:
    """Note which parameter a shard stands for: code may know that one by its identity."""
    setattr(placed, _PREDECESSOR, _Predecessor(parameter))


def predecessor_id(placed: torch.Tensor) -> int | None:
    """The identity of the parameter that a shard has replaced; None where there is none."""
    found = vars(placed).get(_PREDECESSOR)
    return None if found is None or found.parameter is None else id(found.parameter)


def describe_losses(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """What would be lost if DTensors replaced these plain parameters."""
    given = {name: p for name, p in parameters.items() if not is_retired(p)}
    tables = _torch.GRADIENT_HOOK_TABLES
    hooked = [name for name, p in given.items() if any(_torch.hooks_of(p, tables))]
    filled = [name for name, p in given.items() if p.grad is not None]
    problems = []
    if hooked:
        problems.append(
            f"{', '.join(hooked)}: hooks on the gradient are lost, as another parameter "
            "takes this one's place; register them after parallelize_module, for "
            "gradients that are DTensors"
        )
    if filled:
        problems.append(
            f"{', '.join(filled)}: the gradient is lost, as another parameter takes this "
            "one's place; call zero_grad() before parallelize_module"
        )
    return problems
