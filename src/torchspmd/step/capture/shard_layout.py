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
from torchspmd.errors import CaptureError
from torchspmd.step.capture.checksums import sign_values
from torchspmd.step.capture.counters import is_counter
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.capture.shard_cut import (
    Cut,
    find_layout_problem,
    is_over,
    plan_cut,
    read_cut,
)
from torchspmd.step.capture.shard_retired import retire
from torchspmd.step.capture.signature import name_of_hook


@dataclass(frozen=True, slots=True)
class Fact:
    """Name, shape and checksum of a tensor that was cut, and how it lay before."""

    text: str
    layout: Any

    def holds_along(self, axis: DeviceMesh) -> bool:
        """Whether the ranks of another axis must hold the same values."""
        if self.layout is None:
            return True
        is_same = bool(self.layout.mesh == axis)
        return is_same and bool(self.layout.placements[0].is_replicate())


@dataclass(frozen=True, slots=True)
class Relayout:
    """Shards that wait to take the place of plain tensors.

    Attributes:
        inventory: What the step will work on: the same slots, with shards in them.
        facts: One for each new shard; equal along the data axis if ranks held one model.
        beside: The other axes that parameters lie over.
    """

    inventory: Inventory
    facts: tuple[Fact, ...]
    beside: tuple[DeviceMesh, ...]
    _before: Inventory

    def facts_along(self, axis: DeviceMesh) -> tuple[str, ...]:
        """Those that are equal along another axis too."""
        return tuple(fact.text for fact in self.facts if fact.holds_along(axis))

    def commit(self) -> None:
        """Put the shards into modules, parameter groups, optimizer state and gradients."""
        before, after = self._before, self.inventory.slots
        for place in before.places:
            place.table[place.key] = after[place.slot].tensor
        _torch.renew_flat_weights(module for _, module in before.modules)
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
            retire(old, slot.name)

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


def plan_cuts(inventory: Inventory, mesh: DeviceMesh) -> dict[int, Cut]:
    """How each parameter of a step lies, or will lie, over the data axis, by its slot."""
    problems = [
        *_module_problems(inventory, mesh),
        *_parameter_problems(inventory, mesh),
    ]
    if not problems:
        cuts = {
            place: _cut(slot.tensor, mesh)
            for place, slot in enumerate(inventory.slots)
            if slot.role is Role.PARAMETER
        }
        problems = list(_belonging_problems(inventory, cuts))
    if problems:
        raise CaptureError(
            f"compile(parallel_mode=DataParallel('fully_shard')) on mesh {mesh}:\n\n"
            + "\n".join(f"  * {line}" for line in problems)
            + "\n\nThe mode takes parameters of modules that are arguments of the step, "
            "plain or laid out over one other axis of the mesh, and shards them over the "
            "data axis by itself. Nothing was changed."
        )
    return cuts


def plan_layout(inventory: Inventory, cuts: dict[int, Cut]) -> Relayout | None:
    """Shards for all parameters of a step that are no shards yet; None: all are."""
    slots = list(inventory.slots)
    for place, cut in _belongings(inventory, cuts):
        if _waits_for(cut, slots[place].tensor):
            slots[place] = replace(slots[place], tensor=shard(slots[place], cut))
    if all(old is new for old, new in zip(inventory.slots, slots, strict=True)):
        return None
    after = replace(inventory, slots=slots)
    beside = tuple({cut.whole.mesh: None for cut in cuts.values() if cut.whole})
    return Relayout(after, _facts(inventory.slots, slots), beside, inventory)


def _cut(tensor: torch.Tensor, mesh: DeviceMesh) -> Cut:
    layout = _torch.layout_of(tensor)
    known = None if layout is None else read_cut(layout, mesh)
    return known or plan_cut(layout, tuple(tensor.shape), tensor.dtype, mesh)


def _belongings(
    inventory: Inventory, cuts: dict[int, Cut]
) -> Iterator[tuple[int, Cut]]:
    """Every parameter, and its gradient and the states that have its shape with it."""
    yield from cuts.items()
    for parameter, gradient in inventory.gradients.items():
        yield gradient, cuts[parameter]
    for state in inventory.states:
        tensor, cut = inventory.slots[state.slot].tensor, cuts[state.parameter]
        if tensor.shape == cut.layout.shape and not is_counter(state.key, tensor):
            yield state.slot, cut


def _waits_for(cut: Cut, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies as the gathered one does, and is to be cut."""
    return _lies_as(tensor, cut.whole)


def _lies_as(tensor: torch.Tensor, layout: Any) -> bool:
    found = _torch.layout_of(tensor)
    if found is None or layout is None:
        return found is layout
    same_mesh = bool(found.mesh == layout.mesh)
    return same_mesh and bool(found.placements == layout.placements)


def shard(slot: Slot, cut: Cut) -> torch.Tensor:
    """This rank's rows of a tensor, as a DTensor; a tensor without rows is replicated."""
    whole = _torch.plain_tensor(slot.tensor).detach()
    local = whole[slice(*cut.kept)] if cut.is_sharded else whole
    local = local.clone(memory_format=torch.contiguous_format)
    mesh, placements = cut.layout.mesh, cut.layout.placements
    shape = tuple(slot.tensor.shape)
    spec = _torch.build_spec(mesh, placements, shape, whole.dtype)
    sharded = _torch.wrap_local(local, spec)
    if slot.role is not Role.PARAMETER:
        return sharded
    parameter = nn.Parameter(sharded, requires_grad=slot.tensor.requires_grad)
    parameter.__dict__.update(vars(slot.tensor))  # marks that users put on parameters
    return parameter


def _facts(before: list[Slot], after: list[Slot]) -> tuple[Fact, ...]:
    """A checksum of each tensor that was cut: ranks with other values would mix them."""
    cut = [old for old, new in zip(before, after, strict=True) if old is not new]
    return tuple(
        Fact(text, _torch.layout_of(slot.tensor))
        for slot, text in zip(cut, sign_values(cut), strict=True)
    )


def _module_problems(inventory: Inventory, mesh: DeviceMesh) -> Iterator[str]:
    # Not at the top: importing it registers operators.
    from torch.distributed.fsdp import FSDPModule

    for root, module in inventory.modules:
        for prefix, child in module.named_modules():
            path = f"{root}.{prefix}" if prefix else root
            if isinstance(child, (FSDPModule, DistributedDataParallel)):
                yield (
                    f"{path} is wrapped already ({type(child).__name__}) and would "
                    "gather and reduce a second time: build the model without "
                    "fully_shard() and DistributedDataParallel"
                )
            if _computes_on_shards(child, mesh):
                yield (
                    f"{path} has a style that computes on shards over this very axis, "
                    "which the mode would gather: pass the data axis, mesh=mesh['dp']"
                )


def _computes_on_shards(module: nn.Module, mesh: DeviceMesh) -> bool:
    # By its name: the step does not import the styles.
    if not type(module).__module__.startswith("torchspmd.parallel."):
        return False
    layouts = map(_torch.layout_of, module.parameters(recurse=False))
    return any(layout and is_over(layout, mesh) for layout in layouts)


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
        if read_cut(layout, mesh) is not None:
            return ""
        problem = find_layout_problem(layout, mesh)
        if problem:
            return problem
    elif type(tensor) not in (nn.Parameter, torch.Tensor):
        return f"is a {type(tensor).__name__}, and shards would lose this type"
    if tensor.is_meta:
        return "is on the meta device: give it values first (module.to_empty())"
    if tensor.device.type != mesh.device_type:
        return f"is on {tensor.device}, the mesh is on {mesh.device_type}"
    for _, _, hook in _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES):
        # A gathered parameter gives its gradient the layout by itself.
        if not isinstance(hook, _torch.LaysOutGradient):
            return (
                f"has a gradient hook ({name_of_hook(hook)}), which its shard would not "
                "have: do that in the step, after backward"
            )
    return ""


def _belonging_problems(inventory: Inventory, cuts: dict[int, Cut]) -> Iterator[str]:
    for place, cut in _belongings(inventory, cuts):
        slot = inventory.slots[place]
        if not _waits_for(cut, slot.tensor) and not _lies_as(slot.tensor, cut.layout):
            layout = _torch.layout_of(slot.tensor)
            found = "plain" if layout is None else f"{list(layout.placements)}"
            wanted = cut.whole or cut.layout
            yield (
                f"{slot.name} is {found}, its parameter {list(wanted.placements)} on "
                f"{wanted.mesh}: clear it before the first step (zero_grad(), a new "
                "optimizer), or lay it out as its parameter"
            )
