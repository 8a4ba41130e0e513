"""The plain parameters that styles have replaced, and who may still hold them.

An optimizer, a list or another module that keeps one works on a tensor that the model no
longer reads. Asking such a parameter for its gradient, or sending one there, is an error.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.errors import LayoutError

# Set on a replaced parameter: what it was, for texts, and what is in its place, so that
# a second module that is tied to it gets the same DTensor and not another copy.
_WAS = "_torchspmd_was"
_REPLACED_BY = "_torchspmd_replaced_by"

_CHANGED = "The module was changed: build it anew."


class ReplacedParameter(torch.Tensor):
    """A parameter from before ``parallelize_module``: to be read, not to be trained.

    Replaced parameters are of this class and of the one that they had.
    """

    @property
    def grad(self) -> None:
        """There is none that would change the model; a frozen one expects none."""
        if self.requires_grad:
            _refuse(getattr(self, _WAS, "a parameter"))

    @grad.setter
    def grad(self, value: object) -> None:
        if self.requires_grad or value is not None:
            _refuse(getattr(self, _WAS, "a parameter"))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own, which nothing has replaced."""
        made = nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


@dataclass(frozen=True, slots=True)
class _RefuseGradient:
    """Hook on a replaced parameter: whatever was computed with it trains nothing."""

    was: str

    def __call__(self, gradient: torch.Tensor) -> NoReturn:
        _refuse(self.was)


def _refuse(was: str) -> NoReturn:
    raise LayoutError(
        f"{was} has been replaced by parallelize_module, and this is the tensor from "
        "before, of which the model knows nothing: its gradient is asked for or arrives "
        "here. Make optimizers, averages and lists of parameters after "
        "parallelize_module, from model.parameters(), and run forward and backward on "
        "the same side of it. If another module shares the parameter, lay out both in "
        "one plan, with the same layout, or untie them first."
    )


def successor(parameter: torch.Tensor) -> Any:
    """The DTensor that has replaced a parameter; None where none has."""
    kept = getattr(parameter, _REPLACED_BY, None)
    return None if kept is None else kept()


def set_successor(parameter: torch.Tensor, placed: torch.Tensor) -> None:
    """Note which DTensor has replaced a parameter, for as long as a model holds it."""
    setattr(parameter, _REPLACED_BY, weakref.ref(placed))


def carry_attributes(parameter: torch.Tensor, placed: torch.Tensor) -> None:
    """Hand on what was noted on a parameter, such as the optimizer group it belongs to.

    A tensor of its shape, such as a buffer for gradients, does not fit the new one.
    """
    for name, value in vars(parameter).items():
        fits = not (isinstance(value, torch.Tensor) and value.shape == parameter.shape)
        if name not in (_WAS, _REPLACED_BY) and fits:
            setattr(placed, name, value)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a module held a plain parameter before the styles were applied."""

    path: str
    owner: nn.Module
    kind: str  # the owner's class before a style gave it another
    name: str
    parameter: nn.Parameter

    def now(self) -> nn.Parameter | None:
        """What it holds there now; None where the parameter was split into parts."""
        return dict(self.owner.named_parameters(recurse=False)).get(self.name)


def plain_spots(module: nn.Module) -> list[Spot]:
    """Every name of every parameter that is no DTensor yet."""
    found = []
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor):
            prefix, _, name = path.rpartition(".")
            owner = module.get_submodule(prefix)
            found.append(Spot(path, owner, type(owner).__name__, name, parameter))
    return found


def retire_replaced(spots: Sequence[Spot]) -> None:
    """Keep ties that styles have cut, and make use of replaced parameters an error."""
    by_parameter: dict[int, list[Spot]] = {}
    for spot in spots:
        by_parameter.setdefault(id(spot.parameter), []).append(spot)
    replaced = [
        shared
        for shared in by_parameter.values()
        if any(spot.now() is not spot.parameter for spot in shared)
    ]
    # Those of our own styles were checked before; other styles show theirs only now.
    problems = _losses({shared[0].path: shared[0].parameter for shared in replaced})
    if problems:
        text = "; ".join(problems)
        raise LayoutError(f"parallelize_module: {text}. {_CHANGED}")
    for shared in replaced:
        _tie_again(shared)
        _retire(shared[0])


def _tie_again(spots: list[Spot]) -> None:
    """One object for all names: styles of torch make another for each module."""
    held = [spot.now() for spot in spots]
    known = successor(spots[0].parameter)
    first: Any = held[0] if known is None else known
    same = all(_same_layout(first, parameter) for parameter in held)
    if all(parameter is first for parameter in held):
        return
    if same:
        for spot in spots:
            spot.owner.register_parameter(spot.name, first)
        return
    listed = ", ".join(
        f"'{spot.path}' {_describe(parameter)}"
        for spot, parameter in zip(spots, held, strict=True)
    )
    if known is not None:
        listed += f", a module of an earlier call {_describe(known)[3:]}"
    raise LayoutError(
        f"parallelize_module: one parameter has become several: {listed}. Give the "
        "modules that share it styles with the same layout, or untie them first. "
        f"{_CHANGED}"
    )


def _same_layout(first: Any, other: Any) -> bool:
    return (
        isinstance(first, DTensor)
        and isinstance(other, DTensor)
        and other.device_mesh == first.device_mesh
        and other.placements == first.placements
    )


def _describe(parameter: nn.Parameter | None) -> str:
    if isinstance(parameter, DTensor):
        return f"is laid out as {parameter.placements[0]!r}"
    return "is as it was" if parameter is not None else "was split into parts"


def _retire(spot: Spot) -> None:
    parameter, placed = spot.parameter, spot.now()
    if isinstance(parameter, ReplacedParameter):
        return
    if isinstance(placed, DTensor):
        carry_attributes(parameter, placed)
        set_successor(parameter, placed)
    was = f"'{spot.path}' ({spot.kind})"
    if parameter.requires_grad:
        parameter.register_hook(_RefuseGradient(was))
    _mark(parameter, was)


def _mark(parameter: nn.Parameter, was: str) -> None:
    setattr(parameter, _WAS, was)
    try:
        parameter.__class__ = _replaced_class(type(parameter))
    except TypeError as error:
        if not parameter.requires_grad:
            return  # no optimizer trains it
        raise LayoutError(
            f"parallelize_module: {was} is a {type(parameter).__name__}, whose objects "
            "cannot be marked as replaced, so an optimizer from before would train it in "
            "vain. Make it an nn.Parameter before parallelize_module, or leave its module "
            f"out of the plan. {_CHANGED}"
        ) from error


@cache
def _replaced_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of replaced parameters that were of this one, with what it adds."""
    return new_class(f"Replaced{kind.__name__}", (ReplacedParameter, kind))


def describe_losses(module: nn.Module, names: Sequence[str]) -> list[str]:
    """What would be lost with the plain parameters of these names."""
    given = {
        name: parameter
        for name, parameter in module.named_parameters()
        if name in names and not isinstance(parameter, DTensor)
    }
    return _losses(given)


def _losses(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    tables = _torch.GRADIENT_HOOK_TABLES
    given = [
        (name, parameter)
        for name, parameter in parameters.items()
        if not isinstance(parameter, ReplacedParameter)
    ]
    hooked = [name for name, p in given if any(_torch.hooks_of(p, tables))]
    filled = [name for name, p in given if p.grad is not None]
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
