"""Checksums of tensors that ranks must hold alike, and which tensors these are."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory, Role, Slot

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sign_values(slots: Sequence[Slot]) -> list[str]:
    """Name, shape and checksum of the values of each tensor; of a DTensor, of its shard."""
    if not slots:
        return []
    with torch.no_grad():
        sums = torch.stack([_bits(slot.tensor).sum().cpu() for slot in slots]).tolist()
    return [
        f"{slot.name} {list(slot.tensor.shape)} #{_folded(value):08x}"
        for slot, value in zip(slots, sums, strict=True)
    ]


def sign_parameters(inventory: Inventory, axis: DeviceMesh) -> tuple[str, ...]:
    """The parameters of a step that must be equal on all ranks of the data axis.

    Buffers may differ: each rank can have statistics of its own batches.
    """
    if axis.size() == 1 or dist.get_backend() == "fake":
        return ()
    ranks = frozenset(int(rank) for rank in axis.mesh.flatten().tolist())
    slots = [
        slot
        for slot in inventory.slots
        if slot.role is Role.PARAMETER
        and not _torch.is_fake(_torch.plain_tensor(slot.tensor))
        and not _is_cut_over(slot.tensor, ranks)
    ]
    return tuple(sign_values(slots))


def _is_cut_over(tensor: torch.Tensor, ranks: frozenset[int]) -> bool:
    """Whether some of these ranks hold different parts of a tensor."""
    layout = _torch.layout_of(tensor)
    if layout is None:
        return False
    return any(
        len(ranks.intersection(dist.get_process_group_ranks(group))) > 1
        for dim, placement in enumerate(layout.placements)
        if not placement.is_replicate() and (group := layout.mesh.get_group(dim))
    )


def _folded(value: int) -> int:
    # Both halves: round float64 numbers differ in the upper one alone.
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = _torch.plain_tensor(tensor).detach().contiguous()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    return whole.view(_INTEGERS[whole.element_size()])
