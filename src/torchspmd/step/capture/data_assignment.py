"""Assignments to a tensor's ``data``: no operator that a graph could hold."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from torchspmd.errors import CaptureError
from torchspmd.step.capture.refusals import calling_line

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # it is a property


@final
class NoDataAssignment(TorchFunctionMode):
    """Refuses ``tensor.data = ...``: the graph would keep the values from before.

    It cannot be taken for a copy: what still holds the old memory keeps the old values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA:
            raise CaptureError(
                "compile: the step assigns to the data of a tensor, which is no operator "
                f"and would be lost\n\n  * {calling_line()}\n\nWrite the values into the "
                "tensor: `with torch.no_grad(): p.copy_(...)` instead of `p.data = ...`."
            )
        return func(*args, **(kwargs or {}))
