"""Parameters whose gradients a step clears before it makes its own.

What such a step finds in ``grad`` decides nothing, so its own gradient may be put there
later. Where ``grad`` is None to begin with, a graph does not show whether the step would
have cleared it: the call of ``zero_grad()`` does.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchspmd.step.capture.stage import Stage


@contextlib.contextmanager
def noting_cleared(stage: Stage) -> Iterator[None]:
    """Note on the stage whose gradients ``zero_grad()`` clears before backward."""
    places = {id(shown): place for place, shown in enumerate(stage.shown)}

    def note(parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            place = places.get(id(parameter))
            if place is not None and place not in stage.arrived:
                stage.fresh.add(place)

    def of_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        note(each for group in optimizer.param_groups for each in group["params"])
        optimizer_clears(optimizer, *args, **kwargs)

    def of_module(module: Any, *args: Any, **kwargs: Any) -> None:
        note(module.parameters())
        module_clears(module, *args, **kwargs)

    optimizer_clears, module_clears = Optimizer.zero_grad, nn.Module.zero_grad
    _set(Optimizer, of_optimizer)
    _set(nn.Module, of_module)
    try:
        yield
    finally:
        _set(Optimizer, optimizer_clears)
        _set(nn.Module, module_clears)


def _set(kind: Any, clears: Callable[..., None]) -> None:
    kind.zero_grad = clears
