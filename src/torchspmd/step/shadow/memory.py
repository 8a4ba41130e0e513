"""Whether copies of a call and an eager call of it fit into memory."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.capture.spread import Spread
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.program import Program


def describe_shortage(text: str) -> str:
    """What does not fit, and how to compare nevertheless."""
    return (
        f"{text}. To compare, run a few steps with fewer layers or a smaller batch, on a "
        "CPU, or pass shadow=0 to leave it"
    )


def needed_bytes(program: Program, inventory: Inventory, spread: Spread) -> int:
    """Of copies and of an eager call: as much as the graph's own worst moment, or more."""
    copies = gradients = 0
    size = 1 if spread.mesh is None else spread.mesh.size()
    for slot in inventory.slots:
        local = _torch.plain_tensor(slot.tensor)
        taken = local.numel() * local.element_size()
        if isinstance(spread, FullySharded) and _torch.layout_of(slot.tensor):
            taken *= spread.axes.shard.size()
        elif isinstance(spread, GlobalBatch) and slot.role is Role.INPUT:
            taken *= size
        copies += taken
        gradients += 2 * taken if slot.role is Role.PARAMETER else 0
    peak = 0 if program.peak_memory is None else program.peak_memory.total_bytes
    if isinstance(spread, GlobalBatch):
        peak *= size
    return max(peak, copies) + gradients + (copies if peak < copies else 0)


def free_bytes(inventory: Inventory) -> int | None:
    """What the device can still give to this rank; None where that is not known."""
    devices = {slot.tensor.device for slot in inventory.slots}
    cuda = [each for each in devices if each.type == "cuda"]
    if cuda:
        free, _ = torch.cuda.mem_get_info(cuda[0])
        cached = torch.cuda.memory_reserved(cuda[0]) - torch.cuda.memory_allocated(
            cuda[0]
        )
        return int(free) + int(cached)
    known = Path("/proc/meminfo")
    if not known.exists():
        return None
    found = dict(line.split(":", 1) for line in known.read_text().splitlines())
    available = int(found.get("MemAvailable", "0 kB").split()[0]) * 1024
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or (
        dist.get_world_size() if dist.is_initialized() else 1
    )
    return available // ranks
