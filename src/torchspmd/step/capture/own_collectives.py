"""Collectives that the user's step starts itself, on memory that no graph can follow."""

from typing import Any, final

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.refusals import calling_line


@final
class NoOwnCollectives(_torch.TorchDispatchMode):
    """Refuses ``torch.distributed``'s collectives: a graph would lose what they write."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            raise CaptureError(
                "compile: the step calls torch.distributed itself, which cannot be "
                f"captured ({func})\n\n  * {calling_line()}\n\nGradients are reduced "
                "already, without a call. Reduce or gather what the step returns after "
                "the step, and put barriers around it. Inside of the step use the "
                "functional form, which returns its result: all_reduce(), "
                "all_gather_tensor(), ... of "
                "torch.distributed._functional_collectives."
            )
        return func(*args, **(kwargs or {}))
