"""Writes of a function into arguments that were redistributed for it."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement

from torchspmd import _torch
from torchspmd.local.frame import Frame
from torchspmd.local.layout import format_layout
from torchspmd.local.messages import Problem, refuse

_RULE = "A redistributed argument is a copy: what is written into it is lost."


class _Copy(NamedTuple):
    name: str
    placements: tuple[Placement, ...]
    local: torch.Tensor
    version: int


class Copies:
    """The redistributed arguments of one call."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, name: str, given: DTensor, seen: torch.Tensor) -> None:
        """Note what the function sees of an argument's copy."""
        local = _torch.local_tensor(seen) if isinstance(seen, DTensor) else seen
        version = _torch.version_of(local)
        self._copies.append(_Copy(name, given.placements, local, version))

    def refuse_writes(self, function: str, frame: Frame) -> None:
        """Raise if the function wrote into a copy."""
        problems = [
            Problem(
                f"{copy.name}: has {format_layout(copy.placements)}, and the function "
                "wrote into the copy that redistribute_inputs=True made of it",
                f"Redistribute {copy.name} before the call and keep that DTensor; or "
                "return the new value as an output.",
            )
            for copy in self._copies
            if _torch.version_of(copy.local) != copy.version
        ]
        refuse(function, frame.mesh, "a write would be lost", problems, _RULE)


def with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for an inference tensor a twin on its memory that counts writes."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return twin.set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
