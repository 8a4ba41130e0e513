"""Module types that have no local form: hooks around DTensor dispatch.

The module's own forward runs on DTensors; slower, with the same numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.parallel.axis import check_even
from torchspmd.parallel.redistribute import arriving, redistribute
from torchspmd.parallel.route import Route, Steps, enter, enter_features


def run_on_dtensors(module: nn.Module, route: Route) -> None:
    """Give the module its first input as a DTensor; lay out its output by the style."""
    for parameter in module.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            parameter.register_hook(_GradientLikeParameter(parameter.placements))
    module.register_forward_pre_hook(_Enter(route))
    module.register_forward_hook(_Leave(route))


# Hooks are objects of module-level classes, so that a parallel module still pickles.


@dataclass(frozen=True, slots=True)
class _GradientLikeParameter(_torch.LaysOutGradient):
    """Gives a gradient the layout of its parameter.

    DTensor leaves the gradient of a replicated parameter as a sum still to be taken,
    and takes it again in every later use.
    """

    placements: tuple[Placement, ...]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        return gradient


@dataclass(frozen=True, slots=True)
class _Enter:
    route: Route

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        route, first = self.route, inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            raise LayoutError(
                f"{route.where}: expecting input of {type(module).__name__} to be a "
                f"torch.Tensor or DTensor, but got a {type(first).__name__}."
            )
        steps = route.steps(first.ndim, first.ndim)
        return (self._prepare(module, first, steps), *inputs[1:])

    def _prepare(
        self, module: nn.Module, tensor: torch.Tensor, steps: Steps
    ) -> torch.Tensor:
        route, needed = self.route, steps.desired_input
        if isinstance(tensor, DTensor):
            tensor, source, shape = arriving(tensor, needed, route.axis, route.where)
            if source == needed:
                return tensor
        else:
            value = (
                enter_features(tensor, route, steps, module.in_features)
                if isinstance(module, nn.Linear)
                else enter(tensor, route, steps)
            )
            source, shape = value.layout, value.shape
        return redistribute(tensor, source, needed, route.axis, shape, as_dtensor=True)


@dataclass(frozen=True, slots=True)
class _Leave:
    route: Route

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> torch.Tensor:
        route = self.route
        if not isinstance(output, DTensor):
            raise LayoutError(
                f"{route.where}: {type(module).__name__}.forward returned a "
                f"{type(output).__name__}, not a DTensor, so its layout is unknown. "
                "Return one tensor that is computed from the input."
            )
        wanted = route.steps(output.ndim, output.ndim).output
        if output.placements != (wanted,):
            output = output.redistribute(placements=(wanted,))
        if route.local_output:
            check_even(tuple(output.shape), wanted, route.axis, route.where)
        return output.to_local() if route.local_output else output
