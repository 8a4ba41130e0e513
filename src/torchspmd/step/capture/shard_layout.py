"""Parameters, their gradients and their optimizer state, laid out as shards.

Everything is made beside the user's objects first; only when the step was captured and
all ranks agreed do the shards take the place of the plain tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd.errors import CaptureError, UsageError
from torchspmd.step.capture.inventory import Inventory, Role, Slot


@dataclass(frozen=True, slots=True)
class Relayout:
    """Shards that wait to take the place of plain tensors.

    Attributes:
        inventory: What the step will work on: the same slots, with shards in them.
        facts: One line for each new shard; equal on all ranks if these held one model.
    """

    inventory: Inventory
    facts: tuple[str, ...]
    _before: Inventory

    def commit(self) -> None:
        """Put the shards into modules, parameter groups, optimizer state and gradients."""
        before, after = self._before, self.inventory.slots
        for place in before.places:
            place.table[place.key] = after[place.slot].tensor
        for index, number, slots in before.groups:
            group = before.optimizers[index][1].param_groups[number]
            group["params"][:] = [after[slot].tensor for slot in slots]
        for index in range(len(before.optimizers)):
            self._commit_state(index)
        for parameter, gradient in before.gradients.items():
            after[parameter].tensor.grad = after[gradient].tensor
        replaced = [
            (old.tensor, new)
            for old, new in zip(before.slots, after, strict=True)
            if old is not new and old.role is Role.PARAMETER
        ]
        before.slots[:] = after
        before.by_id.clear()
        before.by_id.update({id(s.tensor): n for n, s in enumerate(before.slots)})
        for old, slot in replaced:
            _retire(old, slot.name)

    def _commit_state(self, index: int) -> None:
        state, slots = self._before.saved_states[index], self.inventory.slots
        for place in self._before.states:
            if place.optimizer == index:
                owner = self._before.slots[place.parameter].tensor
                state[owner][place.key] = slots[place.slot].tensor
        entries = list(state.items())
        state.clear()  # the same mapping, with its order, under the new parameters
        for parameter, entry in entries:
            slot = self._before.by_id.get(id(parameter))
            state[parameter if slot is None else slots[slot].tensor] = entry


class _Retired(nn.Parameter):
    """A parameter whose place was taken: whoever still uses it is told."""

    _name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, _ = _torch.flatten_tree((args, kwargs))
        name = next(leaf for leaf in leaves if isinstance(leaf, cls)).__dict__["_name"]
        raise UsageError(
            f"{name}: this is the whole parameter from before the first step; "
            "DataParallel('fully_shard') put a shard in its place. Take it from the model "
            "again (model.parameters()), and pass every optimizer and module that holds "
            "it to the step, or make them after the first step."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.__dict__['_name']}: replaced by its shard>"


def _retire(parameter: torch.Tensor, name: str) -> None:
    """Free the whole tensor, and let no one use it by mistake."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    parameter.__dict__["_name"] = name
    parameter.__class__ = _Retired


def plan_layout(inventory: Inventory, mesh: DeviceMesh) -> Relayout | None:
    """Shards for all plain parameters of a step; None when there are none."""
    problems = [*_module_problems(inventory), *_parameter_problems(inventory, mesh)]
    if problems:
        raise CaptureError(
            f"compile(parallel_mode=DataParallel('fully_shard')) on mesh {mesh}:\n\n"
            + "\n".join(f"  * {line}" for line in problems)
            + "\n\nThe mode takes plain parameters of modules that are arguments of the "
            "step, and shards them over the data axis by itself. Nothing was changed."
        )
    slots = list(inventory.slots)
    for place in _plain_places(inventory):
        slots[place] = replace(slots[place], tensor=shard(slots[place], mesh))
    if all(old is new for old, new in zip(inventory.slots, slots, strict=True)):
        return None
    after = replace(inventory, slots=slots)
    return Relayout(after, _facts(inventory.slots, slots), inventory)


def _plain_places(inventory: Inventory) -> Iterator[int]:
    """Slots to lay out: plain parameters, and what has a parameter's shape with them."""
    shapes = {}
    for place, slot in enumerate(inventory.slots):
        if slot.role is Role.PARAMETER:
            shapes[place] = slot.tensor.shape
            if _is_plain(slot.tensor):
                yield place
    for parameter, gradient in inventory.gradients.items():
        if parameter in shapes and _is_plain(inventory.slots[gradient].tensor):
            yield gradient
    for state in inventory.states:
        tensor = inventory.slots[state.slot].tensor
        is_counter = state.key == "step" and tensor.ndim == 0
        if _is_plain(tensor) and tensor.shape == shapes[state.parameter]:
            if not is_counter:
                yield state.slot


def _is_plain(tensor: torch.Tensor) -> bool:
    return _torch.layout_of(tensor) is None


def shard(slot: Slot, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor, as a DTensor; a tensor without rows is replicated."""
    from torch.distributed.tensor import Placement, Replicate, Shard

    whole = slot.tensor.detach()
    placement: Placement = Replicate()
    local = whole
    if whole.ndim and whole.numel():
        placement = Shard(0)
        start, stop = rows_of(whole.shape[0], mesh.size(), mesh.get_local_rank())
        local = whole[start:stop]
    local = local.clone(memory_format=torch.contiguous_format)
    spec = _torch.build_spec(mesh, (placement,), tuple(whole.shape), whole.dtype)
    sharded = _torch.wrap_local(local, spec)
    if slot.role is not Role.PARAMETER:
        return sharded
    parameter = nn.Parameter(sharded, requires_grad=slot.tensor.requires_grad)
    parameter.__dict__.update(vars(slot.tensor))  # marks that users put on parameters
    return parameter


def rows_of(rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and last row (excluded) of a rank: full shares first, as DTensor has it.

    >>> [rows_of(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-rows // num_ranks)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def _facts(before: list[Slot], after: list[Slot]) -> tuple[str, ...]:
    """A checksum of each tensor that was cut: ranks with other values would mix them."""
    cut = [old for old, new in zip(before, after, strict=True) if old is not new]
    with torch.no_grad():
        sums = torch.stack([_bits(slot.tensor).sum().cpu() for slot in cut]).tolist()
    return tuple(
        f"{slot.name} {list(slot.tensor.shape)} #{value & 0xFFFFFFFF:08x}"
        for slot, value in zip(cut, sums, strict=True)
    )


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().contiguous()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    return whole.view(_INTEGERS[whole.element_size()])


def _module_problems(inventory: Inventory) -> Iterator[str]:
    # Not at the top: importing it registers operators.
    from torch.distributed.fsdp import FSDPModule

    for root, module in inventory.modules:
        for prefix, child in module.named_modules():
            if isinstance(child, (FSDPModule, DistributedDataParallel)):
                path = f"{root}.{prefix}" if prefix else root
                yield (
                    f"{path} is wrapped already ({type(child).__name__}) and would "
                    "gather and reduce a second time: build the model without "
                    "fully_shard() and DistributedDataParallel"
                )


def _parameter_problems(inventory: Inventory, mesh: DeviceMesh) -> Iterator[str]:
    in_modules = {place.slot for place in inventory.places}
    for place, slot in enumerate(inventory.slots):
        if slot.role is Role.PARAMETER:
            problem = _problem(slot, mesh)
            if place not in in_modules:
                problem = (
                    "is in no module that the step takes: pass the module that holds it, "
                    "so that its shard can be put there"
                )
            if problem:
                yield f"{slot.name} {problem}"


def _problem(slot: Slot, mesh: DeviceMesh) -> str:
    tensor = slot.tensor
    layout = _torch.layout_of(tensor)
    if layout is not None:
        if is_ours(layout, mesh):
            return ""
        return (
            f"is a DTensor {list(layout.placements)} on {layout.mesh}: only Shard(0) over "
            "the data axis can be gathered. Use DataParallel('replicate') with a model "
            "that has layouts of its own"
        )
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return f"is a {type(tensor).__name__}, and shards would lose this type"
    if tensor.is_meta:
        return "is on the meta device: give it values first (module.to_empty())"
    if tensor.device.type != mesh.device_type:
        return f"is on {tensor.device}, the mesh is on {mesh.device_type}"
    if _torch.has_gradient_hooks(tensor):
        return (
            "has a gradient hook, which its shard would not have: do that in the step"
        )
    return ""


def is_ours(layout: Any, mesh: DeviceMesh) -> bool:
    """Whether a layout is one that this mode makes, on the same ranks."""
    from torch.distributed.tensor import Replicate, Shard

    same_ranks = layout.mesh.mesh.tolist() == mesh.mesh.tolist()
    return same_ranks and layout.placements in ((Shard(0),), (Replicate(),))
