"""Copies of the tensors of a call, in the places of the user's own while a block runs.

The user's tensors are not written, so that nothing has to be copied back: only tables,
lists and the ``state`` of optimizers hold something else for a while, as in a capture.
"""

import contextlib
import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.layout.retired import copy_attributes
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.shared_memory import extent_of
from torchspmd.step.capture.substitute import in_users_objects
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.gather import gather_rows
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.modes.shard_layout import read_sharding
from torchspmd.step.program import Program

# ----------------------------------------------------------------------------
# What the eager step works on: in each mode, the tensors that its meaning is written for.


@dataclass(frozen=True, slots=True, repr=False)
class Whole:
    """A tensor as the eager step sees it, and how to get this rank's part of it.

    Attributes:
        tensor: The copy.
        part: From a value of its form to this rank's part, as the compiled step has it.
    """

    tensor: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]


def copy_slots(
    inventory: Inventory, mode: ParallelMode, ahead: Mapping[int, torch.Tensor]
) -> list[Whole]:
    """A copy of every tensor of a call; what shares memory shares it in the copies too.

    Args:
        inventory: What the call works on.
        mode: The mode; it says which tensors are whole for the eager step.
        ahead: Values, by slot, that are newer than those of the user's own tensors,
            which have a pending update.
    """
    bases = _shared_bases(inventory)
    return [
        _copied(slot, mode, bases, ahead.get(place))
        for place, slot in enumerate(inventory.slots)
    ]


def _copied(
    slot: Slot,
    mode: ParallelMode,
    bases: dict[int, "_Base"],
    newer: torch.Tensor | None,
) -> Whole:
    tensor = slot.tensor
    layout = _torch.layout_of(tensor)
    local = _torch.plain_tensor(tensor) if newer is None else newer
    part: Callable[[torch.Tensor], torch.Tensor] = _torch.plain_tensor
    if isinstance(mode, FullySharded) and layout is not None:
        sharding = read_sharding(layout, mode.axes)
        assert sharding is not None, layout
        made = gather_rows(local.detach(), sharding)
        if sharding.whole is not None:
            made = _torch.wrap_local(made, sharding.whole)
        if sharding.is_sharded:
            rows = slice(*sharding.kept)

            def part(value: torch.Tensor) -> torch.Tensor:
                return _torch.plain_tensor(value)[rows]

    elif isinstance(mode, GlobalBatch) and slot.role is Role.INPUT and tensor.ndim:
        made, part = _global_rows(tensor, mode)
    elif newer is None and (base := bases.get(_torch.storage_key(tensor))) is not None:
        made = base.view_of(tensor)
    else:
        made = local.detach().clone()
        if layout is not None:
            made = _torch.wrap_local(made, layout)
    return Whole(_like(tensor, made), part)


def _global_rows(
    tensor: torch.Tensor, mode: GlobalBatch
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The rows of all ranks, and how to get back to those of this rank."""
    mesh: DeviceMesh = mode.mesh
    laid_out: Any = tensor
    if (layout := _torch.layout_of(tensor)) is not None:
        whole = _torch.finished(laid_out.full_tensor()).clone()
        if not any(place.is_shard(0) for place in layout.placements):
            return whole, _torch.plain_tensor
        rows = _torch.plain_tensor(tensor).shape[0]
    else:
        local = tensor.detach().contiguous()
        whole = _torch.gather_now(local, mesh.size(), mesh.get_group().group_name)
        rows = tensor.shape[0]
    first = mesh.get_local_rank() * rows

    def part(value: torch.Tensor) -> torch.Tensor:
        return value[first : first + rows]

    return whole, part


@dataclass(slots=True, repr=False)
class _Base:
    """One copy of memory that several tensors of a call look at."""

    first: int
    end: int
    memory: torch.Tensor | None = None

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor is in its own memory, in the copy."""
        if self.memory is None:
            size = self.end - self.first
            flat = tensor.detach().as_strided((size,), (1,), self.first)
            self.memory = flat.clone()
        place = tensor.storage_offset() - self.first
        return self.memory.as_strided(tensor.shape, tensor.stride(), place)


def _shared_bases(inventory: Inventory) -> dict[int, _Base]:
    """The memory that more than one plain tensor of a call lies in."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for slot in inventory.slots:
        tensor = slot.tensor
        if _torch.layout_of(tensor) is None and tensor.numel():
            found[_torch.storage_key(tensor)].append(tensor)
    return {
        key: _Base(min(map(_first, tensors)), max(map(_end, tensors)))
        for key, tensors in found.items()
        if len(tensors) > 1 and len({each.dtype for each in tensors}) == 1
    }


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: torch.Tensor) -> int:
    return _first(tensor) + int(extent_of(tensor))


def _like(original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A copy that is a parameter where the original is one, with what users set on it."""
    if not isinstance(original, nn.Parameter):
        return made.requires_grad_(original.requires_grad)
    parameter = nn.Parameter(made, requires_grad=original.requires_grad)
    kind = type(original)
    if type(parameter) is nn.Parameter and _torch.layout_of(original) is None:
        if kind is not nn.Parameter:
            parameter.__class__ = kind
    copy_attributes(original, parameter)
    return parameter


# ----------------------------------------------------------------------------
# The copies in the user's objects.


@dataclass(slots=True, repr=False)
class Copies:
    """The copies of one call, and what became of them.

    Attributes:
        inventory: The call.
        wholes: A copy for each slot.
        numbers: Newer values of counters that are Python numbers, by their place.
        states: After the block, what each optimizer keeps for each parameter's slot.
        replaced: After the block, the tensors that modules hold in the place of copies.
    """

    inventory: Inventory
    wholes: list[Whole]
    numbers: Mapping[int, Any] = field(default_factory=dict)
    states: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, Any]:
        """The call's arguments with copies of their tensors."""
        leaves = list(self.inventory.leaves)
        for place, slot in self.inventory.inputs.items():
            leaves[place] = self.wholes[slot].tensor
        args, kwargs = _torch.unflatten_tree(leaves, self.inventory.structure)
        return args, kwargs

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the user's modules, optimizers, scalers and variables hold the copies."""
        inventory, tensors = self.inventory, [each.tensor for each in self.wholes]
        modules = [module for _, module in inventory.modules]
        for parameter, gradient in inventory.gradients.items():
            tensors[parameter].grad = tensors[gradient].detach()
        with contextlib.ExitStack() as stack:
            for _, scaler in inventory.scalers:
                stack.callback(_restore, vars(scaler), dict(vars(scaler)))
                key = "_per_optimizer_states"
                if key in vars(scaler):
                    vars(scaler)[key] = copy.deepcopy(vars(scaler)[key])
            # First, while its lists have the user's weights: the next one fills them anew.
            stack.enter_context(_torch.keep_flat_weights(modules))
            stack.enter_context(
                in_users_objects(inventory, tensors, tensors, self.numbers)
            )
            _torch.renew_flat_weights(modules)
            yield
            self._read()

    def _read(self) -> None:
        """What the block left, before everything is put back."""
        inventory = self.inventory
        slots = {id(each.tensor): place for place, each in enumerate(self.wholes)}
        for place in inventory.places:
            if place.is_attribute:
                continue  # what is stored there now is a value of its own
            now = place.table.get(place.key)
            if now is not self.wholes[place.slot].tensor and now is not None:
                self.replaced[place.slot] = now
        for _, optimizer in inventory.optimizers:
            self.states.append(
                {
                    slots[id(parameter)]: dict(entries)
                    for parameter, entries in optimizer.state.items()
                    if id(parameter) in slots
                }
            )


def _restore(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


# ----------------------------------------------------------------------------
# Whether copies of a call and an eager call of it fit into memory.


def needed_bytes(
    program: Program, inventory: Inventory, mode: ParallelMode, *, calls: int = 1
) -> int:
    """Of copies and of an eager call: as much as the graph's own worst moment, or more.

    A second call begins while what the first has left is kept, with its gradients.
    """
    copies = gradients = 0
    size = 1 if mode.mesh is None else mode.mesh.size()
    for slot in inventory.slots:
        local = _torch.plain_tensor(slot.tensor)
        taken = local.numel() * local.element_size()
        if isinstance(mode, FullySharded) and _torch.layout_of(slot.tensor):
            taken *= mode.axes.shard.size()
        elif isinstance(mode, GlobalBatch) and slot.role is Role.INPUT:
            taken *= size
        copies += taken
        gradients += (1 + calls) * taken if slot.role is Role.PARAMETER else 0
    peak = 0 if program.peak_memory is None else program.peak_memory.total_bytes
    if isinstance(mode, GlobalBatch):
        peak *= size
    kept = (calls - 1) * (copies + gradients)
    return max(peak, copies) + gradients + (copies if peak < copies else 0) + kept


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
