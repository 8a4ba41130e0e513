"""DTensors whose communication is over."""

from torch.distributed.tensor import DTensor, Placement

from torchspmd import _torch


def finished(value: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor in another layout, the communication waited for."""
    if value.placements == placements:
        return value
    moved = value.redistribute(placements=placements)
    local = _torch.finished(_torch.local_tensor(moved))
    made = _torch.wrap_local(local, _torch.spec(moved))
    assert isinstance(made, DTensor)
    return made
